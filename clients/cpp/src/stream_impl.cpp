#include "stream_impl.h"

#include <utility>

#include "status.h"

namespace penstock {
namespace {

constexpr auto kLeavingTimeout = std::chrono::seconds(2);

Nanoseconds resume_timeout_of(const v1::GenerateRequest& request) {
  const auto& resume_timeout = request.resume_timeout();
  return std::chrono::seconds(resume_timeout.seconds()) + Nanoseconds(resume_timeout.nanos());
}

}  // namespace

Stream::Impl::Impl(std::shared_ptr<Client::Core> core, v1::GenerateRequest request,
                   CallOptions options)
    : core_(std::move(core)),
      request_(std::move(request)),
      options_(std::move(options)),
      attempts_(core_->attempts(options_)),
      recovery_(resume_timeout_of(*request_)) {
  core_->check(options_);
  on_stop_.emplace(options_.stop, CancelOnStop{this});
}

Stream::Impl::Impl(std::shared_ptr<Client::Core> core, const ResumePoint& point,
                   Nanoseconds resume_timeout, CallOptions options)
    : core_(std::move(core)),
      options_(std::move(options)),
      attempts_(core_->attempts(options_)),
      recovery_(resume_timeout),
      reader_(point),
      delivered_(point) {
  recovery_.begin_at(point.next_sequence);
  on_stop_.emplace(options_.stop, CancelOnStop{this});
}

Stream::Impl::~Impl() {
  on_stop_.reset();
  const bool is_left = !is_over_ && !failure_;
  source_.reset();
  if (is_left) end_request();
}

bool Stream::Impl::advance(Clock::time_point until) {
  while (!is_ready()) {
    try {
      Source* current = source(until);
      if (current == nullptr || !current->wait_until(until)) return false;
      read();
    } catch (const Error& error) {
      fail(error);
    }
  }
  return true;
}

std::optional<v1::GenerateResponse> Stream::Impl::take() {
  advance(Clock::time_point::max());
  if (failure_) std::rethrow_exception(failure_);
  if (!ready_.has_value()) return {};
  delivered_ = reader_.point();
  return std::exchange(ready_, {});
}

Source* Stream::Impl::source(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  if (source_ != nullptr) return source_.get();
  const auto wake = std::min(until, begins_at_);
  wait_on(change_, lock, wake, [this] { return is_cancelled_; });
  if (is_cancelled_) throw Error(cancelled(reader_.point().request_id));
  if (Clock::now() < begins_at_) return nullptr;
  const bool is_resumed = !request_.has_value() || recovery_.is_under_way();
  source_ = is_resumed ? core_->resume(reader_.next_point(), options_, attempts_.deadline())
                       : core_->generate(*request_, options_, attempts_.deadline());
  return source_.get();
}

void Stream::Impl::read() {
  auto response = source_->take();
  if (!response.has_value()) {
    ready_ = reader_.end();
    is_over_ = true;
  } else if (reader_.receive(*response)) {
    ready_ = std::move(response);
  }
}

void Stream::Impl::fail(const Error& error) {
  std::unique_ptr<Source> lost;
  bool is_cancelled = false;
  {
    const std::lock_guard lock(mutex_);
    lost = std::move(source_);
    is_cancelled = is_cancelled_;
  }
  lost.reset();
  const auto delay = is_cancelled ? std::nullopt : delay_after(error.failure());
  if (delay.has_value()) {
    begins_at_ = Clock::now() + *delay;
    ++num_lost_attempts_;
    return;
  }
  const Failure explained = recovery_.explain(error.failure());
  if (is_cancelled) end_request();
  const bool is_broken = explained.code == grpc::StatusCode::DATA_LOSS && explained.reason.empty();
  failure_ = is_broken
                 ? std::make_exception_ptr(StreamBroken(explained.message, explained.request_id))
                 : std::make_exception_ptr(Error(explained));
}

std::optional<Nanoseconds> Stream::Impl::delay_after(const Failure& failure) {
  const auto now = Clock::now();
  const ResumePoint& point = reader_.point();
  const auto resumes_in = recovery_.delay_after(failure, !point.request_id.empty(),
                                                point.next_sequence, now, draw_jitter());
  if (resumes_in.has_value()) return resumes_in;
  // Resuming again is safe, because nothing is delivered twice.
  if (!request_.has_value()) return attempts_.delay_after(failure, false, now, draw_jitter());
  const auto delay =
      attempts_.delay_after(recovery_.explain(failure), reader_.has_output(), now, draw_jitter());
  if (delay.has_value()) reader_ = StreamReader();
  return delay;
}

void Stream::Impl::cancel() noexcept {
  const std::lock_guard lock(mutex_);
  is_cancelled_ = true;
  if (source_ != nullptr) source_->cancel();
  change_.notify_all();
}

ResumePoint Stream::Impl::detach() {
  is_detached_ = true;
  std::unique_ptr<Source> left;
  {
    const std::lock_guard lock(mutex_);
    left = std::move(source_);
  }
  left.reset();
  is_over_ = true;
  ready_.reset();
  return delivered_;
}

void Stream::Impl::stop() {
  if (source_ != nullptr && source_->stop()) return;
  core_->cancel(reader_.point().request_id, {.stop = options_.stop});
}

void Stream::Impl::end_request() noexcept {
  const std::string& request_id = reader_.point().request_id;
  if (!recovery_.is_possible() || request_id.empty() || is_detached_) return;
  try {
    core_->cancel(request_id, {.timeout = kLeavingTimeout, .metadata = options_.metadata});
  } catch (const std::exception&) {
    // If this fails, the request ends after its resume_timeout.
    return;
  }
}

void Stream::Impl::give_credit(std::uint32_t num_tokens) {
  const std::lock_guard lock(mutex_);
  if (source_ != nullptr) source_->give_credit(num_tokens);
}

std::multimap<std::string, std::string> Stream::Impl::initial_metadata() {
  if (source_ == nullptr && !is_ready()) source(Clock::time_point::max());
  return source_ == nullptr ? std::multimap<std::string, std::string>()
                            : source_->initial_metadata();
}

Stream::Stream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

std::optional<v1::GenerateResponse> Stream::next() {
  return impl_->take();
}

bool Stream::wait_for(std::chrono::nanoseconds timeout) {
  return impl_->advance(Clock::now() + timeout);
}

std::string Stream::text() {
  std::string text;
  while (const auto event = next()) {
    if (event->has_tokens() && event->tokens().output_index() == 0) text += event->tokens().text();
  }
  return text;
}

void Stream::cancel() noexcept {
  impl_->cancel();
}
ResumePoint Stream::detach() {
  return impl_->detach();
}
ResumePoint Stream::point() const {
  return impl_->point();
}
void Stream::stop() {
  impl_->stop();
}
void Stream::give_credit(std::uint32_t num_tokens) {
  impl_->give_credit(num_tokens);
}
std::multimap<std::string, std::string> Stream::initial_metadata() {
  return impl_->initial_metadata();
}
int Stream::num_lost_attempts() const {
  return impl_->num_lost_attempts();
}

}  // namespace penstock
