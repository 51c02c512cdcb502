// The scenario about many requests on one Multiplex stream.
#include "scenario.h"

namespace conformance {
namespace {

constexpr int kNumTexts = 6;
constexpr std::uint32_t kNumTokens = 40;

v1::GenerateRequest numbered(int number) {
  return greedy(std::string(kPrompt) + ", number " + std::to_string(number), kNumTokens);
}

// Six texts, and a seventh request that fails without affecting the others.
void check_texts(const ScenarioInput& scenario, penstock::Client& multiplexed) {
  std::vector<CheckedStream> all;
  for (int number = 0; number < kNumTexts; ++number) {
    all.emplace_back(multiplexed.generate(numbered(number), scenario.call()));
    // Four requests run and the queue holds four, but it is processed only once per step.
    all.back().until_tokens(number < 4 ? 1 : 0);
  }
  auto bad = greedy(4);
  bad.mutable_sampling()->set_temperature(-1.0F);
  CheckedStream seventh(multiplexed.generate(bad, scenario.call()));
  try {
    seventh.until_end();
    throw ExpectationFailed("temperature -1 was answered");
  } catch (const penstock::Error& error) {
    require(error.code() == grpc::StatusCode::INVALID_ARGUMENT, error.what());
  }
  auto plain = scenario.client();
  for (auto& checked : all) checked.until_end();
  for (int number = 0; number < kNumTexts; ++number) {
    const auto once = text_of_once(scenario, plain, numbered(number));
    const auto& text = all[static_cast<std::size_t>(number)].text();
    require(once == text, "\"" + text + "\" is not \"" + once + "\"");
  }
}

// An eighth request that is cancelled by its key, while a ninth one waits for credit.
void cancel_and_credit(const ScenarioInput& scenario, penstock::Client& multiplexed) {
  CheckedStream eighth(multiplexed.generate(greedy(kLongTokens), scenario.call()));
  auto by_hand = scenario.call();
  by_hand.num_credit_tokens = 5;
  CheckedStream ninth(multiplexed.generate(greedy(20), by_hand));
  eighth.until_tokens();
  eighth.stream().stop();
  eighth.until_end();
  require(eighth.reason() == v1::FINISH_REASON_CANCELLED, "the eighth did not end as CANCELLED");
  ninth.until_tokens(5);
  // When this request has ended, the one without credit has had the time to end.
  CheckedStream clock(multiplexed.generate(greedy(60), scenario.call()));
  clock.until_end();
  require(ninth.num_tokens() == 5 && !ninth.stream().wait_for(0ns),
          "more than 5 tokens came for a credit of 5");
  ninth.stream().give_credit(100);
  ninth.until_end();
  require(ninth.num_tokens() == 20, std::to_string(ninth.num_tokens()) + " tokens, not 20");
}

}  // namespace

void multiplex(const ScenarioInput& scenario) {
  penstock::Client multiplexed(
      scenario.address, {.retry = penstock::kNoRetry, .multiplex = penstock::MultiplexOptions{}});
  check_texts(scenario, multiplexed);
  cancel_and_credit(scenario, multiplexed);
}

}  // namespace conformance
