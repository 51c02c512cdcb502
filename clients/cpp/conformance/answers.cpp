// Scenarios about responses: streams, prompts, text and metadata.
#include <algorithm>
#include <numeric>

#include "scenario.h"

namespace conformance {
namespace {

constexpr auto kText = "naïve 日本語 🚀";
constexpr std::uint32_t kNumLargeTokens = 100'000;

void stream_in_order(const ScenarioInput& scenario) {
  auto client = scenario.client();
  CheckedStream checked(client.generate(greedy(12), scenario.call()));
  const auto& finished = checked.until_end();
  const auto& accepted = checked.until_accepted();
  require(!accepted.request_id().empty() && !accepted.model().empty(), "accepted without names");
  require(checked.num_tokens() == 12, std::to_string(checked.num_tokens()) + " tokens, not 12");
  require(finished.usage().num_completion_tokens() == 12, "usage does not report 12 tokens");
  require(checked.reason() == v1::FINISH_REASON_LENGTH, "the reason is not LENGTH");
}

void once_equals_stream(const ScenarioInput& scenario) {
  auto client = scenario.client();
  CheckedStream checked(client.generate(greedy(32), scenario.call()));
  checked.until_end();
  const auto once = text_of_once(scenario, client, greedy(32));
  require(once == checked.text(), "\"" + once + "\" is not \"" + checked.text() + "\"");
  require(!once.empty(), "there is no text");
}

void token_prompt(const ScenarioInput& scenario) {
  std::vector<std::uint32_t> ids(20);
  std::iota(ids.begin(), ids.end(), 5U);
  auto request = greedy(penstock::token_request(ids, 12));
  request.mutable_output()->set_return_token_ids(true);
  auto client = scenario.client();
  std::vector<std::vector<std::uint32_t>> answers;
  for (int time = 0; time < 2; ++time) {
    CheckedStream checked(client.generate(request, scenario.call()));
    const auto num_reported = checked.until_end().usage().num_prompt_tokens();
    require(num_reported == ids.size(),
            "usage reports " + std::to_string(num_reported) + " prompt tokens, not 20");
    answers.push_back(checked.token_ids());
  }
  require(answers[0].size() == 12, std::to_string(answers[0].size()) + " token ids, not 12");
  require(answers[0] == answers[1], "other token ids the second time");
}

void chat(const ScenarioInput& scenario) {
  auto client = scenario.client();
  CheckedStream checked(client.generate(
      greedy(penstock::chat_request(
          {{"system", "You answer in one sentence."}, {"user", "Where is the Globe?"}}, 24)),
      scenario.call()));
  checked.until_end();
  require(!checked.text().empty(), "there is no text");
  require(checked.num_tokens() == 24, std::to_string(checked.num_tokens()) + " tokens, not 24");
}

// As in the Unicode standard, table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(const std::string& text) {
  for (std::size_t place = 0; place < text.size();) {
    const auto lead = static_cast<unsigned char>(text[place]);
    const std::size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if ((lead >= 0x80 && lead < 0xC2) || lead > 0xF4 || place + length > text.size()) return false;
    for (std::size_t next = 1; next < length; ++next) {
      const auto trail = static_cast<unsigned char>(text[place + next]);
      unsigned char least = 0x80;
      unsigned char most = 0xBF;
      if (next == 1) {
        if (lead == 0xE0) least = 0xA0;
        if (lead == 0xED) most = 0x9F;
        if (lead == 0xF0) least = 0x90;
        if (lead == 0xF4) most = 0x8F;
      }
      if (trail < least || trail > most) return false;
    }
    place += length;
  }
  return true;
}

void utf8_across_chunks(const ScenarioInput& scenario) {
  auto request = greedy(kText, 200);
  request.mutable_output()->set_min_chunk_tokens(1);
  auto client = scenario.client();
  CheckedStream checked(client.generate(request, scenario.call()));
  auto whole = greedy(kText, 200);
  whole.mutable_output()->set_echo(true);
  const auto once = client.generate_once(whole, scenario.call());
  checked.until_end();
  require(once.prompt().text() == kText, "the prompt came back as " + once.prompt().text());
  require(checked.text() == once.outputs(0).text(), "the chunks do not add up to the text");
  const bool is_ascii =
      std::ranges::all_of(checked.text(), [](char letter) { return (letter & 0x80) == 0; });
  require(!is_ascii, "the text has no character beyond ASCII");
  require(std::ranges::all_of(checked.chunks(), is_utf8), "a chunk is no UTF-8");
}

void large_prompt(const ScenarioInput& scenario) {
  std::vector<std::uint32_t> ids(kNumLargeTokens);
  for (std::uint32_t place = 0; place < kNumLargeTokens; ++place) ids[place] = 5 + place % 1000;
  auto client = scenario.client();
  CheckedStream checked(client.generate(greedy(penstock::token_request(ids, 4)), scenario.call()));
  const auto num_reported = checked.until_end().usage().num_prompt_tokens();
  require(num_reported == kNumLargeTokens,
          "usage reports " + std::to_string(num_reported) + " tokens");
  require(checked.num_tokens() == 4, std::to_string(checked.num_tokens()) + " tokens, not 4");
}

void metadata(const ScenarioInput& scenario) {
  const auto trace_id = draw_hex(32);
  auto request = greedy(4);
  request.set_request_id(new_id());
  auto options = scenario.call();
  options.traceparent = "00-" + trace_id + "-" + draw_hex(16) + "-01";
  auto client = scenario.client();
  CheckedStream checked(client.generate(request, options));
  checked.until_end();
  const auto& reported = checked.until_accepted().trace_id();
  require(reported == trace_id, "the trace id is " + reported + ", not " + trace_id);
  const auto& request_id = checked.until_accepted().request_id();
  require(request_id == request.request_id(), "accepted as " + request_id);
}

}  // namespace

Checks answers() {
  return {{"stream_in_order", stream_in_order},
          {"once_equals_stream", once_equals_stream},
          {"token_prompt", token_prompt},
          {"chat", chat},
          {"utf8_across_chunks", utf8_across_chunks},
          {"large_prompt", large_prompt},
          {"metadata", metadata}};
}

}  // namespace conformance
