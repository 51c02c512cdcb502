// One attempt at a stream: a Generate call, a Resume call, or a request on a Multiplex call. Also
// the inbox in which gRPC's threads store messages for the reader.
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

  // Returns whether take() would return immediately; waits for that until `until`.
  virtual bool wait_until(Clock::time_point until) = 0;
  // Waits for the next message and returns it; none if the stream ended with status OK. Throws
  // Error.
  virtual std::optional<v1::GenerateResponse> take() = 0;
  // Stops the attempt, from any thread. A thread that waits in take() gets the end.
  virtual void cancel() noexcept = 0;
  // Requests the server to end the request without an error. Returns whether this attempt supports
  // that.
  virtual bool stop() = 0;
  virtual void give_credit(std::uint32_t num_tokens) = 0;
  virtual std::multimap<std::string, std::string> initial_metadata() = 0;
};

class Inbox {
 public:
  // Returns the number of messages in it, including this one.
  std::size_t put(v1::GenerateResponse&& response);
  // Ends it. Only the first call takes effect. If `is_urgent`, messages received before are
  // dropped.
  void end(std::optional<Failure> failure, bool is_urgent = false);
  bool wait_until(Clock::time_point until);
  // Like Source::take.
  std::optional<v1::GenerateResponse> take();

 private:
  [[nodiscard]] bool has_updates() const { return !messages_.empty() || is_ended_; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::GenerateResponse> messages_;
  bool is_ended_ = false;
  std::optional<Failure> failure_;
};

// Waits for a condition. time_point::max() means no time limit, with which the standard library's
// wait_until would overflow.
template <typename Predicate>
bool wait_on(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
             Clock::time_point until, Predicate is_so) {
  if (until != Clock::time_point::max()) return condition.wait_until(lock, until, is_so);
  condition.wait(lock, is_so);
  return true;
}

}  // namespace penstock
