// What the scenarios share: the service's address, the way to state that something did not hold,
// and a stream that is read piece by piece while its order is checked.
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
// Of calls that are not about deadlines; a scenario has 20 s.
inline constexpr auto kCallTimeout = 50s;
inline constexpr std::uint32_t kLongTokens = 10'000;

// What a scenario asks did not hold.
class NotHeld : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& why);

// What a scenario gets. `ready` reports the driver; `until_go` reports it and waits for its go.
struct Talk {
  std::string address{};
  std::stop_token stop{};
  std::function<void()> ready{};
  std::function<void()> until_go{};

  // A client with a separate connection, which reports every failure at once.
  [[nodiscard]] penstock::Client client() const;
  [[nodiscard]] penstock::CallOptions call() const;
};

using Check = void (*)(const Talk& talk);
using Checks = std::map<std::string, Check>;

Checks answers();
Checks refusals();
Checks lives();
void multiplex(const Talk& talk);

// A request id that no client else has.
std::string new_id();
// Hexadecimal digits drawn at random.
std::string draw_hex(int num_digits);

// Exactly `max_tokens` tokens, a function of the prompt.
v1::GenerateRequest greedy(v1::GenerateRequest request);
v1::GenerateRequest greedy(const std::string& prompt, std::uint32_t num_tokens);
inline v1::GenerateRequest greedy(std::uint32_t num_tokens) {
  return greedy(kPrompt, num_tokens);
}

// The text of GenerateOnce, and its failure.
std::string text_of_once(const Talk& talk, penstock::Client& client,
                         const v1::GenerateRequest& request);
penstock::Failure refused(const Talk& talk, penstock::Client& client,
                          const v1::GenerateRequest& request, grpc::StatusCode code,
                          const std::string& reason);

// The events of one stream as they are read, each checked against the one before. The client
// refuses gaps by itself; this looks again, because that is what is tested.
class Heard {
 public:
  explicit Heard(penstock::Stream stream, std::uint64_t next_sequence = 0)
      : stream_(std::move(stream)), next_sequence_(next_sequence) {}

  const v1::RequestAccepted& until_accepted();
  void until_tokens(std::uint32_t num_tokens = 1);
  // To the end, past the last event.
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
