#include "retry.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace penstock {
namespace {

constexpr Nanoseconds kFirstResumeDelay = std::chrono::milliseconds(50);
constexpr Nanoseconds kMaxResumeDelay = std::chrono::seconds(1);

Nanoseconds scaled(Nanoseconds duration, double factor) {
  return std::chrono::duration_cast<Nanoseconds>(
      std::chrono::duration<double, std::nano>(duration) * factor);
}

bool is_loss(const Failure& failure) {
  const bool is_broken =
      failure.code == grpc::StatusCode::UNAVAILABLE || failure.code == grpc::StatusCode::DATA_LOSS;
  return is_broken && failure.reason != "ENGINE_DOWN";
}

}  // namespace

void RetryBudget::deposit() {
  const std::lock_guard lock(mutex_);
  left_ = std::min(left_ + 1, kReserve);
}

bool RetryBudget::take() {
  const std::lock_guard lock(mutex_);
  if (left_ < kCallsPerRetry) return false;
  left_ -= kCallsPerRetry;
  return true;
}

bool is_transient(const Failure& failure) {
  if (failure.is_retry_forbidden || failure.reason == "READER_STALLED") return false;
  if (failure.code == grpc::StatusCode::RESOURCE_EXHAUSTED) {
    // Without details, RESOURCE_EXHAUSTED usually means a message over a size limit, which is
    // permanent.
    return failure.reason == "QUEUE_FULL" || failure.reason == "QUOTA_EXCEEDED" ||
           failure.retry_after.has_value();
  }
  return failure.code == grpc::StatusCode::UNAVAILABLE;
}

Attempts::Attempts(const RetryPolicy& policy, RetryBudget& budget,
                   std::optional<Nanoseconds> timeout, Clock::time_point now)
    : policy_(policy), budget_(&budget), deadline_(Clock::time_point::max()) {
  if (timeout.has_value()) {
    if (*timeout <= Nanoseconds::zero()) throw std::invalid_argument("timeout: must be positive");
    if (*timeout < Clock::time_point::max() - now) deadline_ = now + *timeout;
  }
  budget.deposit();
}

std::optional<Nanoseconds> Attempts::delay_after(const Failure& failure, bool has_output,
                                                 Clock::time_point now, double jitter) {
  ++num_failed_;
  if (has_output || num_failed_ >= policy_.max_attempts || !is_transient(failure)) return {};
  Nanoseconds delay{};
  if (failure.retry_after.has_value()) {
    delay = scaled(*failure.retry_after, 1.0 + policy_.pushback_jitter * jitter);
  } else {
    const double growth = std::pow(policy_.multiplier, num_failed_ - 1);
    const double most = std::chrono::duration<double, std::nano>(policy_.max_backoff) /
                        std::chrono::duration<double, std::nano>(1);
    const double wanted =
        static_cast<double>(Nanoseconds(policy_.initial_backoff).count()) * growth;
    delay = Nanoseconds(std::llround(std::min(wanted, most) * (0.5 + 0.5 * jitter)));
  }
  if (has_deadline() && delay >= deadline_ - now) return {};
  return budget_->take() ? std::optional(delay) : std::nullopt;
}

void Recovery::begin_at(std::uint64_t next_sequence) {
  is_under_way_ = true;
  sequence_ = next_sequence;
}

std::optional<Nanoseconds> Recovery::delay_after(const Failure& failure, bool is_accepted,
                                                 std::uint64_t next_sequence, Clock::time_point now,
                                                 double jitter) {
  const bool has_progressed = !sequence_.has_value() || next_sequence > *sequence_;
  // No engine runs from which the stream could be resumed. A stream that has continued gets the
  // same error when the request itself fails.
  const bool is_out_of_reach = is_under_way_ && !has_progressed && failure.reason == "ENGINE_DOWN";
  is_under_way_ = is_possible() && is_accepted && (is_loss(failure) || is_out_of_reach);
  if (!is_under_way_) return {};
  if (!first_.has_value() || has_progressed) {
    // A new loss with a new resume timeout.
    first_ = failure;
    lost_at_ = now;
    num_failed_ = 0;
  }
  sequence_ = next_sequence;
  const auto backoff =
      std::min(kMaxResumeDelay, kFirstResumeDelay * (std::int64_t{1} << std::min(num_failed_, 10)));
  ++num_failed_;
  const auto delay = std::max(scaled(backoff, 0.5 + 0.5 * jitter),
                              failure.retry_after.value_or(Nanoseconds::zero()));
  is_under_way_ = delay <= lost_at_ + resume_timeout_ - now;
  return is_under_way_ ? std::optional(delay) : std::nullopt;
}

Failure Recovery::explain(const Failure& failure) const {
  return failure.reason == "REQUEST_NOT_FOUND" && first_.has_value() ? *first_ : failure;
}

}  // namespace penstock
