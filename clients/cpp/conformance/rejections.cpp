// Scenarios about rejected requests, and about the details in their statuses.
#include <algorithm>

#include "scenario.h"

namespace conformance {
namespace {

constexpr int kNumPlaces = 4;
constexpr int kNumWaiting = 4;
// The retry delay of the server depends on the length of the other requests.
constexpr std::uint32_t kBlockingTokens = 300;

void invalid_field(const ScenarioInput& scenario) {
  auto request = greedy(4);
  request.mutable_sampling()->set_temperature(-1.0F);
  auto client = scenario.client();
  const auto failure =
      rejected(scenario, client, request, grpc::StatusCode::INVALID_ARGUMENT, "INVALID_ARGUMENT");
  const bool is_named = std::ranges::any_of(failure.field_violations, [](const auto& violation) {
    return violation.field == "sampling.temperature";
  });
  require(is_named, "BadRequest does not name sampling.temperature");
}

void unknown_model(const ScenarioInput& scenario) {
  auto request = greedy(4);
  request.set_model("no-such-model");
  auto client = scenario.client();
  const auto failure =
      rejected(scenario, client, request, grpc::StatusCode::NOT_FOUND, "MODEL_NOT_FOUND");
  const auto model = failure.metadata.find("model");
  require(model != failure.metadata.end() && model->second == "no-such-model",
          "ErrorInfo does not name the model");
}

void unimplemented_feature(const ScenarioInput& scenario) {
  auto request = penstock::text_request(kPrompt, 4);
  request.mutable_constraint()->mutable_json_schema()->set_schema(R"({"type": "object"})");
  auto client = scenario.client();
  const auto failure =
      rejected(scenario, client, request, grpc::StatusCode::UNIMPLEMENTED, "FEATURE_UNSUPPORTED");
  const auto feature = failure.metadata.find("feature");
  require(feature != failure.metadata.end() && feature->second == "json_schema",
          "ErrorInfo does not name the feature");
}

void duplicate_request_id(const ScenarioInput& scenario) {
  auto request = greedy(100);
  request.set_request_id(new_id());
  auto client = scenario.client();
  CheckedStream first(client.generate(request, scenario.call()));
  first.until_tokens();
  rejected(scenario, client, request, grpc::StatusCode::ALREADY_EXISTS, "REQUEST_ID_IN_USE");
  first.until_end();
  require(first.num_tokens() == 100,
          "the first had " + std::to_string(first.num_tokens()) + " tokens, not 100");
}

// Submits eight long requests: four that have tokens, then four that wait.
std::vector<CheckedStream> full_queue(const ScenarioInput& scenario, penstock::Client& client,
                                      std::uint32_t num_tokens) {
  std::vector<CheckedStream> blockers;
  for (int number = 0; number < kNumPlaces + kNumWaiting; ++number) {
    blockers.emplace_back(client.generate(greedy(num_tokens), scenario.call()));
    blockers.back().until_accepted();
    if (number < kNumPlaces) blockers.back().until_tokens();
  }
  return blockers;
}

void queue_full(const ScenarioInput& scenario) {
  auto client = scenario.client();
  const auto blockers = full_queue(scenario, client, kLongTokens);
  const auto failure =
      rejected(scenario, client, greedy(4), grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL");
  require(failure.retry_after > 0ns, "RetryInfo has no wait");
}

void retry_after_rejection(const ScenarioInput& scenario) {
  auto client = scenario.client();
  auto blockers = full_queue(scenario, client, kBlockingTokens);
  penstock::Client retrying(scenario.address, {.retry = {.max_attempts = 10}});
  CheckedStream late(retrying.generate(greedy(8), scenario.call()));
  while (late.stream().num_lost_attempts() == 0) {
    require(!late.stream().wait_for(20ms), "the ninth was not rejected");
    require(!scenario.stop.stop_requested(), "the ninth was neither rejected nor accepted");
  }
  blockers.clear();
  late.until_end();
  require(late.num_tokens() == 8, std::to_string(late.num_tokens()) + " tokens, not 8");
}

}  // namespace

Checks rejections() {
  return {{"invalid_field", invalid_field},
          {"unknown_model", unknown_model},
          {"unimplemented_feature", unimplemented_feature},
          {"duplicate_request_id", duplicate_request_id},
          {"queue_full", queue_full},
          {"retry_after_rejection", retry_after_rejection}};
}

}  // namespace conformance
