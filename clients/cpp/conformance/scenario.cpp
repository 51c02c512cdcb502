#include "scenario.h"

#include <random>

namespace conformance {

void require(bool holds, const std::string& why) {
  if (!holds) throw ExpectationFailed(why);
}

penstock::Client ScenarioInput::client() const {
  return penstock::Client(address, {.retry = penstock::kNoRetry});
}

penstock::CallOptions ScenarioInput::call() const {
  return {.timeout = kCallTimeout, .stop = stop};
}

std::string draw_hex(int num_digits) {
  static std::mt19937_64 engine{std::random_device{}()};
  std::uniform_int_distribution<std::size_t> digit(0, 15);
  std::string text;
  for (int number = 0; number < num_digits; ++number) text += "0123456789abcdef"[digit(engine)];
  return text;
}

std::string new_id() {
  return "conformance-" + draw_hex(32);
}

v1::GenerateRequest greedy(v1::GenerateRequest request) {
  request.mutable_sampling()->set_temperature(0.0F);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

v1::GenerateRequest greedy(const std::string& prompt, std::uint32_t num_tokens) {
  return greedy(penstock::text_request(prompt, num_tokens));
}

std::string text_of_once(const ScenarioInput& scenario, penstock::Client& client,
                         const v1::GenerateRequest& request) {
  const auto once = client.generate_once(request, scenario.call());
  require(once.outputs_size() == 1, std::to_string(once.outputs_size()) + " outputs, not 1");
  return once.outputs(0).text();
}

penstock::Failure rejected(const ScenarioInput& scenario, penstock::Client& client,
                           const v1::GenerateRequest& request, grpc::StatusCode code,
                           const std::string& reason) {
  try {
    client.generate_once(request, scenario.call());
  } catch (const penstock::Error& error) {
    require(error.code() == code, std::string("rejected with another status: ") + error.what());
    require(error.reason() == reason,
            "the reason is \"" + error.reason() + "\", not " + reason + ": " + error.what());
    return error.failure();
  }
  throw ExpectationFailed("it was answered, not rejected with " + reason);
}

const v1::RequestAccepted& CheckedStream::until_accepted() {
  while (!has_accepted_) read();
  return accepted_;
}

void CheckedStream::until_tokens(std::uint32_t num_tokens) {
  while (num_tokens_ < num_tokens) read();
}

const v1::RequestFinished& CheckedStream::until_end() {
  while (!has_finished_) read();
  require(!stream_.next().has_value(), "an event after finished");
  return finished_;
}

void CheckedStream::read() {
  const auto event = stream_.next();
  if (!event.has_value()) throw ExpectationFailed("the stream ended without finished");
  require(event->sequence() == next_sequence_, "sequence " + std::to_string(event->sequence()) +
                                                   ", not " + std::to_string(next_sequence_));
  require((next_sequence_ == 0) == event->has_accepted(),
          "`accepted` is not the first message, and it alone");
  ++next_sequence_;
  if (event->has_accepted()) {
    accepted_ = event->accepted();
    has_accepted_ = true;
  } else if (event->has_tokens()) {
    const auto& tokens = event->tokens();
    text_ += tokens.text();
    chunks_.push_back(tokens.text());
    num_tokens_ += tokens.num_tokens();
    for (const auto& record : tokens.records()) token_ids_.push_back(record.id());
  } else if (event->has_finished()) {
    finished_ = event->finished();
    has_finished_ = true;
    require(finished_.outputs_size() == 1, "finished does not have one output");
  }
}

}  // namespace conformance
