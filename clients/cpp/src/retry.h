// When a failed call is tried again, and when a broken stream is resumed. Accounts only: no I/O, no
// waiting, no clock and no separate chance, so that all of it can be tested.
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

// Bounds what all calls of a client retry together: over any stretch at most `kReserve` and a share
// of a fifth of its calls. The retry budget of "Addressing Cascading Failures" in Site Reliability
// Engineering (O'Reilly, 2016), without a clock. Safe for threads.
class RetryBudget {
 public:
  void pay_in();
  // Whether one more retry may be made; it is paid for then.
  [[nodiscard]] bool take();

 private:
  static constexpr std::int64_t kCallsPerRetry = 5;
  static constexpr std::int64_t kReserve = 100 * kCallsPerRetry;
  std::mutex mutex_;
  std::int64_t left_ = kReserve;
};

// Whether the same call may succeed a little later.
[[nodiscard]] bool is_passing(const Failure& failure);

// The attempts of one logical call. `jitter` is drawn evenly from [0, 1).
class Attempts {
 public:
  // Throws std::invalid_argument for a timeout that is not positive.
  Attempts(const RetryPolicy& policy, RetryBudget& budget, std::optional<Nanoseconds> timeout,
           Clock::time_point now);

  [[nodiscard]] Clock::time_point deadline() const { return deadline_; }
  [[nodiscard]] bool has_deadline() const { return deadline_ != Clock::time_point::max(); }
  // Counts a failed attempt; the wait before the next, none for no next one.
  [[nodiscard]] std::optional<Nanoseconds> delay_after(const Failure& failure, bool has_output,
                                                       Clock::time_point now, double jitter);

 private:
  RetryPolicy policy_;
  RetryBudget* budget_;
  Clock::time_point deadline_;
  int num_failed_ = 0;
};

// The losses of one stream, each of which is made good within `grace`, or reported. 0: none is.
class Recovery {
 public:
  explicit Recovery(Nanoseconds grace) : grace_(grace) {}

  [[nodiscard]] bool is_possible() const { return grace_ > Nanoseconds::zero(); }
  // The next attempt is a Resume.
  [[nodiscard]] bool is_under_way() const { return is_under_way_; }
  // The stream is a Resume from its first attempt on.
  void begin_at(std::uint64_t next_sequence);
  // The wait before the stream is resumed; none where it cannot be. `is_accepted`: the server knows
  // the request; otherwise no client waits for us.
  [[nodiscard]] std::optional<Nanoseconds> delay_after(const Failure& failure, bool is_accepted,
                                                       std::uint64_t next_sequence,
                                                       Clock::time_point now, double jitter);
  // What to report of an attempt that failed: that no client knows the request any more is only the
  // end of a story that began with the loss.
  [[nodiscard]] Failure explain(const Failure& failure) const;

 private:
  Nanoseconds grace_;
  bool is_under_way_ = false;
  std::optional<Failure> first_{};
  Clock::time_point lost_at_{};
  std::optional<std::uint64_t> sequence_{};
  int num_failed_ = 0;
};

}  // namespace penstock
