// Decides when a failed call is retried, and when a broken stream is resumed. Does no I/O and does
// not wait; clock readings and random numbers are arguments, so that tests control them.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "penstock/error.h"
#include "penstock/options.h"

namespace penstock {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

// Limits the total number of retries of all calls of a client: over any period at most `kReserve`
// plus a fifth of its calls. It is the retry budget of "Addressing Cascading Failures" in Site
// Reliability Engineering (O'Reilly, 2016), here without a clock. Thread-safe.
class RetryBudget {
 public:
  void deposit();
  // Deducts one retry. Returns whether the budget had one.
  [[nodiscard]] bool take();

 private:
  static constexpr std::int64_t kCallsPerRetry = 5;
  static constexpr std::int64_t kReserve = 100 * kCallsPerRetry;
  std::mutex mutex_;
  std::int64_t left_ = kReserve;
};

// Returns whether the same call may succeed soon.
[[nodiscard]] bool is_transient(const Failure& failure);

// The attempts of one logical call. `jitter` is a uniform random number in [0, 1).
class Attempts {
 public:
  // Throws std::invalid_argument for a timeout that is not positive.
  Attempts(const RetryPolicy& policy, RetryBudget& budget, std::optional<Nanoseconds> timeout,
           Clock::time_point now);

  [[nodiscard]] Clock::time_point deadline() const { return deadline_; }
  [[nodiscard]] bool has_deadline() const { return deadline_ != Clock::time_point::max(); }
  // Counts a failed attempt. Returns the wait before the next one; none if there is none.
  [[nodiscard]] std::optional<Nanoseconds> delay_after(const Failure& failure, bool has_output,
                                                       Clock::time_point now, double jitter);

 private:
  RetryPolicy policy_;
  RetryBudget* budget_;
  Clock::time_point deadline_;
  int num_failed_ = 0;
};

// The lost connections of one stream. Each is followed by a Resume within `resume_timeout`, or
// reported. 0: all are reported.
class Recovery {
 public:
  explicit Recovery(Nanoseconds resume_timeout) : resume_timeout_(resume_timeout) {}

  [[nodiscard]] bool is_possible() const { return resume_timeout_ > Nanoseconds::zero(); }
  // True if the next attempt is a Resume.
  [[nodiscard]] bool is_under_way() const { return is_under_way_; }
  // The stream begins with a Resume.
  void begin_at(std::uint64_t next_sequence);
  // Returns the wait before the stream is resumed; none if it cannot be resumed. `is_accepted`: the
  // server has accepted the request; otherwise there is nothing to resume.
  [[nodiscard]] std::optional<Nanoseconds> delay_after(const Failure& failure, bool is_accepted,
                                                       std::uint64_t next_sequence,
                                                       Clock::time_point now, double jitter);
  // Returns the error to report for a failed attempt. If the request was not found, that is the
  // original loss.
  [[nodiscard]] Failure explain(const Failure& failure) const;

 private:
  Nanoseconds resume_timeout_;
  bool is_under_way_ = false;
  std::optional<Failure> first_{};
  Clock::time_point lost_at_{};
  std::optional<std::uint64_t> sequence_{};
  int num_failed_ = 0;
};

}  // namespace penstock
