// Shared by the scenarios: the address of the service, the check of a condition, and a stream that
// is read message by message while its order is checked.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <vector>

#include "penstock/client.h"
#include "penstock/requests.h"

namespace conformance {

namespace v1 = penstock::v1;
using namespace std::chrono_literals;

inline constexpr auto kPrompt = "The old lighthouse keeper climbed the stairs";
// The deadline of calls that do not test deadlines; a scenario has 20 s.
inline constexpr auto kCallTimeout = 50s;
inline constexpr std::uint32_t kLongTokens = 10'000;

// A condition of a scenario does not hold.
class ExpectationFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& why);

// Passed to each scenario. `ready` reports to the driver that the scenario is ready; `until_go`
// also waits for the command to continue.
struct ScenarioInput {
  std::string address{};
  std::stop_token stop{};
  std::function<void()> ready{};
  std::function<void()> until_go{};

  // Returns a client with a separate connection and without retries.
  [[nodiscard]] penstock::Client client() const;
  [[nodiscard]] penstock::CallOptions call() const;
};

using Check = void (*)(const ScenarioInput& scenario);
using Checks = std::map<std::string, Check>;

Checks answers();
Checks rejections();
Checks request_ends();
void multiplex(const ScenarioInput& scenario);

// Returns a unique request id.
std::string new_id();
// Returns random hexadecimal digits.
std::string draw_hex(int num_digits);

// Requests exactly `max_tokens` tokens, which depend only on the prompt.
v1::GenerateRequest greedy(v1::GenerateRequest request);
v1::GenerateRequest greedy(const std::string& prompt, std::uint32_t num_tokens);
inline v1::GenerateRequest greedy(std::uint32_t num_tokens) {
  return greedy(kPrompt, num_tokens);
}

// The text of GenerateOnce, and its failure.
std::string text_of_once(const ScenarioInput& scenario, penstock::Client& client,
                         const v1::GenerateRequest& request);
penstock::Failure rejected(const ScenarioInput& scenario, penstock::Client& client,
                           const v1::GenerateRequest& request, grpc::StatusCode code,
                           const std::string& reason);

// The events of one stream, each checked against the previous one. The client, which is under test,
// checks for gaps itself; this checks again.
class CheckedStream {
 public:
  explicit CheckedStream(penstock::Stream stream, std::uint64_t next_sequence = 0)
      : stream_(std::move(stream)), next_sequence_(next_sequence) {}

  const v1::RequestAccepted& until_accepted();
  void until_tokens(std::uint32_t num_tokens = 1);
  // Reads to the end, past the last event.
  const v1::RequestFinished& until_end();

  [[nodiscard]] penstock::Stream& stream() { return stream_; }
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] std::uint32_t num_tokens() const { return num_tokens_; }
  [[nodiscard]] const std::vector<std::string>& chunks() const { return chunks_; }
  [[nodiscard]] const std::vector<std::uint32_t>& token_ids() const { return token_ids_; }
  [[nodiscard]] v1::FinishReason reason() const { return finished_.outputs(0).finish_reason(); }
  [[nodiscard]] bool has_finished() const { return has_finished_; }

 private:
  void read();

  penstock::Stream stream_;
  std::uint64_t next_sequence_;
  v1::RequestAccepted accepted_{};
  v1::RequestFinished finished_{};
  bool has_accepted_ = false;
  bool has_finished_ = false;
  std::string text_{};
  std::vector<std::string> chunks_{};
  std::vector<std::uint32_t> token_ids_{};
  std::uint32_t num_tokens_ = 0;
};

}  // namespace conformance
