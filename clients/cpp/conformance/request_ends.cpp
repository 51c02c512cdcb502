// Scenarios about the end of requests (cancels, deadlines), and about failures that they survive.
#include <thread>

#include "scenario.h"

namespace conformance {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kEndedWithin = 20s;

// Returns whether a new request may have the id, which is possible if no live request has it.
bool is_free(const ScenarioInput& scenario, penstock::Client& client,
             const std::string& request_id) {
  auto request = greedy(1);
  request.set_request_id(request_id);
  try {
    client.generate_once(request, scenario.call());
    return true;
  } catch (const penstock::Error& error) {
    if (error.reason() != "REQUEST_ID_IN_USE") throw;
    return false;
  }
}

void cancel_after_first_token(const ScenarioInput& scenario) {
  auto request = greedy(kLongTokens);
  request.set_request_id(new_id());
  auto client = scenario.client();
  CheckedStream checked(client.generate(request, scenario.call()));
  checked.until_tokens();
  checked.stream().cancel();
  try {
    checked.until_end();
    throw ExpectationFailed("the cancelled call ended well");
  } catch (const penstock::Error& error) {
    require(error.code() == grpc::StatusCode::CANCELLED, error.what());
  }
  const auto late = Clock::now() + kEndedWithin;
  while (!is_free(scenario, client, request.request_id())) {
    require(Clock::now() < late, "the request is still live 5 s after its call ended");
    std::this_thread::sleep_for(20ms);
  }
}

void cancel_by_id(const ScenarioInput& scenario) {
  auto request = greedy(kLongTokens);
  request.set_request_id(new_id());
  auto client = scenario.client();
  auto other = scenario.client();
  CheckedStream checked(client.generate(request, scenario.call()));
  checked.until_tokens();
  const auto state = other.cancel(request.request_id(), scenario.call());
  require(state == v1::REQUEST_STATE_PROCESSING, "Cancel found it in " + RequestState_Name(state));
  checked.until_end();
  require(checked.reason() == v1::FINISH_REASON_CANCELLED,
          "the reason is " + FinishReason_Name(checked.reason()));
}

void deadline(const ScenarioInput& scenario) {
  auto client = scenario.client();
  const auto begin = Clock::now();
  CheckedStream checked(
      client.generate(greedy(kLongTokens), {.timeout = 1s, .stop = scenario.stop}));
  try {
    checked.until_end();
  } catch (const penstock::Error& error) {
    require(error.code() == grpc::StatusCode::DEADLINE_EXCEEDED, error.what());
    require(Clock::now() - begin < kEndedWithin, "it took more than 5 s to end");
    return;
  }
  throw ExpectationFailed("it ended well");
}

void resume(const ScenarioInput& scenario) {
  constexpr std::uint32_t kNumTokens = 200;
  auto request = greedy(kNumTokens);
  request.mutable_resume_timeout()->set_seconds(30);
  penstock::ResumePoint point;
  std::string text;
  std::uint32_t num_before = 0;
  {
    auto client = scenario.client();
    CheckedStream lost(client.generate(request, scenario.call()));
    lost.until_tokens(20);
    require(!lost.has_finished(), "it had ended before it was cut");
    point = lost.stream().detach();
    text = lost.text();
    num_before = lost.num_tokens();
  }
  auto client = scenario.client();
  CheckedStream rest(client.resume(point, 30s, scenario.call()), point.next_sequence);
  rest.until_end();
  text += rest.text();
  const auto num_tokens = num_before + rest.num_tokens();
  require(num_tokens == kNumTokens, std::to_string(num_tokens) + " tokens, not 200");
  const auto once = text_of_once(scenario, client, greedy(kNumTokens));
  require(text == once, "\"" + text + "\" is not \"" + once + "\"");
}

void engine_killed(const ScenarioInput& scenario) {
  constexpr std::uint32_t kNumTokens = 400;
  penstock::Client client(scenario.address, {.retry = {.max_attempts = 8}});
  CheckedStream checked(client.generate(greedy(kNumTokens), scenario.call()));
  checked.until_tokens();
  scenario.ready();
  checked.until_end();
  require(checked.num_tokens() == kNumTokens, std::to_string(checked.num_tokens()) + " tokens");
  const auto once = text_of_once(scenario, client, greedy(kNumTokens));
  require(checked.text() == once, "the text is not that of GenerateOnce");
}

void drain(const ScenarioInput& scenario) {
  constexpr std::uint32_t kNumTokens = 300;
  auto client = scenario.client();
  CheckedStream checked(client.generate(greedy(kNumTokens), scenario.call()));
  checked.until_tokens();
  scenario.until_go();
  try {
    client.generate_once(greedy(4), scenario.call());
    throw ExpectationFailed("a new request was served");
  } catch (const penstock::Error& error) {
    require(error.code() == grpc::StatusCode::UNAVAILABLE, error.what());
    require(error.reason().empty() || error.reason() == "DRAINING",
            "the reason is " + error.reason());
  }
  checked.until_end();
  require(checked.num_tokens() == kNumTokens,
          std::to_string(checked.num_tokens()) + " tokens, not 300");
}

}  // namespace

Checks request_ends() {
  return {{"cancel_after_first_token", cancel_after_first_token},
          {"cancel_by_id", cancel_by_id},
          {"deadline", deadline},
          {"multiplex", multiplex},
          {"resume", resume},
          {"engine_killed", engine_killed},
          {"drain", drain}};
}

}  // namespace conformance
