#include "source.h"

#include <utility>

namespace penstock {

std::size_t Inbox::put(v1::GenerateResponse&& response) {
  const std::lock_guard lock(mutex_);
  messages_.push_back(std::move(response));
  changed_.notify_all();
  return messages_.size();
}

void Inbox::end(std::optional<Failure> failure, bool is_urgent) {
  const std::lock_guard lock(mutex_);
  if (is_urgent) messages_.clear();
  if (!is_ended_) failure_ = std::move(failure);
  is_ended_ = true;
  changed_.notify_all();
}

bool Inbox::wait_until(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return wait_on(changed_, lock, until, [this] { return has_updates(); });
}

std::optional<v1::GenerateResponse> Inbox::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_updates(); });
  if (!messages_.empty()) {
    v1::GenerateResponse response = std::move(messages_.front());
    messages_.pop_front();
    return response;
  }
  if (failure_.has_value()) throw Error(*failure_);
  return {};
}

}  // namespace penstock
