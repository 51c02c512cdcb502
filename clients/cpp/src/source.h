// One attempt at a stream, whatever carries it: a Generate call, a Resume call, or a request on a
// Multiplex call. And the inbox in which gRPC's threads leave messages for the one who reads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "penstock/error.h"
#include "penstock/v1/generation_service.pb.h"
#include "retry.h"

namespace penstock {

class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;

  // Whether take() would answer at once, waiting until `until` for that.
  virtual bool wait_until(Clock::time_point until) = 0;
  // The next message; none when the stream ended with status OK. Waits for it. Throws Error.
  virtual std::optional<v1::GenerateResponse> take() = 0;
  // May be called from any thread; what waits in take() then meets the end.
  virtual void cancel() noexcept = 0;
  // Asks the server to end the request well; whether this carrier can.
  virtual bool stop() = 0;
  virtual void give_credit(std::uint32_t num_tokens) = 0;
  virtual std::multimap<std::string, std::string> initial_metadata() = 0;
};

class Inbox {
 public:
  // How many messages are in it, this one included.
  std::size_t put(v1::GenerateResponse&& response);
  // The first end counts. `is_urgent`: what came before it is not delivered any more.
  void end(std::optional<Failure> failure, bool is_urgent = false);
  bool wait_until(Clock::time_point until);
  // As Source::take.
  std::optional<v1::GenerateResponse> take();

 private:
  [[nodiscard]] bool has_news() const { return !messages_.empty() || is_ended_; }

  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<v1::GenerateResponse> messages_;
  bool is_ended_ = false;
  std::optional<Failure> failure_;
};

// Waits for a condition; time_point::max() for as long as it takes, which the standard library's
// wait_until would overflow on.
template <typename Predicate>
bool wait_on(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
             Clock::time_point until, Predicate is_so) {
  if (until != Clock::time_point::max()) return condition.wait_until(lock, until, is_so);
  condition.wait(lock, is_so);
  return true;
}

}  // namespace penstock
