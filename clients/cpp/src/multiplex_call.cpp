#include "multiplex_call.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "status.h"
#include "unicode.h"

namespace penstock {
namespace {

v1::MultiplexRequest cancel_command(std::uint64_t key) {
  v1::MultiplexRequest command;
  command.mutable_cancel()->set_key(key);
  return command;
}

v1::MultiplexRequest credit_command(std::uint64_t key, std::uint32_t num_tokens) {
  v1::MultiplexRequest command;
  command.mutable_credit()->set_key(key);
  command.mutable_credit()->set_num_credit_tokens(num_tokens);
  return command;
}

// The deadline of the request is sent as total_timeout, unless its own is earlier.
void limit_deadline(v1::GenerateRequest& generation, Nanoseconds left) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  auto* scheduling = generation.mutable_scheduling();
  if (scheduling->has_total_timeout()) {
    const auto& requested = scheduling->total_timeout();
    if (std::chrono::seconds(requested.seconds()) + Nanoseconds(requested.nanos()) <= left) return;
  }
  auto* deadline = scheduling->mutable_total_timeout();
  deadline->set_seconds(left.count() / kSecond);
  deadline->set_nanos(static_cast<std::int32_t>(left.count() % kSecond));
}

}  // namespace

MultiplexCall::MultiplexCall(v1::GenerationService::Stub& stub,
                             std::unique_ptr<grpc::ClientContext> context,
                             const MultiplexOptions& options, Clock::time_point now)
    : options_(options), expires_at_(now + options.max_call_age), context_(std::move(context)) {
  stub.async()->Multiplex(context_.get(), this);
  // Holds the OnDone callback while the call is read. Each write has its own hold, because it may
  // start outside of a reaction.
  AddHold();
  StartRead(&response_);
  StartCall();
}

MultiplexCall::~MultiplexCall() {
  context_->TryCancel();
  std::unique_lock lock(mutex_);
  change_.wait(lock, [this] { return is_done_; });
}

bool MultiplexCall::can_submit(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  return !(has_ended_ || is_retired_ || takes_no_more_ || now >= expires_at_);
}

bool MultiplexCall::has_ended() {
  const std::lock_guard lock(mutex_);
  return is_done_;
}

std::shared_ptr<MultiplexedRequest> MultiplexCall::submit(Submission submission,
                                                          Clock::time_point now) {
  if (submission.deadline <= now) throw Error(deadline_passed({}));
  // This field of the request is checked here, because it would end the call; the request was
  // checked before.
  if (!is_utf8(submission.traceparent)) {
    throw Error(
        {.code = grpc::StatusCode::INVALID_ARGUMENT, .message = "traceparent: is not valid UTF-8"});
  }
  v1::MultiplexRequest command;
  auto* submit = command.mutable_submit();
  *submit->mutable_generation() = std::move(submission.generation);
  if (submission.deadline != Clock::time_point::max()) {
    limit_deadline(*submit->mutable_generation(), submission.deadline - now);
  }
  if (!submission.traceparent.empty()) submit->set_traceparent(submission.traceparent);
  // A smaller window would hold back a message of min_chunk_tokens forever.
  const std::uint32_t least = 2 * submit->generation().output().min_chunk_tokens();
  const std::uint32_t window = std::max(options_.window_tokens, least);
  submit->set_num_credit_tokens(submission.num_credit_tokens.value_or(window));
  // The largest key has the largest size.
  submit->set_key(std::numeric_limits<std::uint64_t>::max());
  if (const std::size_t size = command.ByteSizeLong(); size > options_.max_request_bytes) {
    throw Error({.code = grpc::StatusCode::RESOURCE_EXHAUSTED,
                 .message = "the request has " + std::to_string(size) + " bytes; the limit is " +
                            std::to_string(options_.max_request_bytes)});
  }
  auto request = std::make_shared<MultiplexedRequest>();
  request->deadline = submission.deadline;
  if (!submission.num_credit_tokens.has_value()) request->top_up_tokens = std::max(1U, window / 2);
  bool is_to_write = false;
  {
    const std::lock_guard lock(mutex_);
    request->key = next_key_++;
    submit->set_key(request->key);
    if (has_ended_ || takes_no_more_) {
      // It has ended since can_submit(), so the server has not received the request.
      request->inbox.end(
          Failure{.code = grpc::StatusCode::UNAVAILABLE,
                  .message = "the Multiplex call ended before the request was sent"});
    } else {
      requests_.emplace(request->key, request);
      is_to_write = enqueue(std::move(command));
    }
  }
  if (is_to_write) write();
  return request;
}

void MultiplexCall::taken(MultiplexedRequest& request, std::uint32_t num_tokens) {
  if (request.top_up_tokens == 0) return;
  std::uint32_t num_due = 0;
  {
    const std::lock_guard lock(mutex_);
    request.num_taken_tokens += num_tokens;
    if (request.num_taken_tokens < request.top_up_tokens) return;
    num_due = std::exchange(request.num_taken_tokens, 0);
  }
  give_credit(request, num_due);
}

void MultiplexCall::give_credit(const MultiplexedRequest& request, std::uint32_t num_tokens) {
  bool is_to_write = false;
  {
    const std::lock_guard lock(mutex_);
    is_to_write =
        requests_.contains(request.key) && enqueue(credit_command(request.key, num_tokens));
  }
  if (is_to_write) write();
}

void MultiplexCall::stop(const MultiplexedRequest& request) {
  bool is_to_write = false;
  {
    const std::lock_guard lock(mutex_);
    is_to_write = requests_.contains(request.key) && enqueue(cancel_command(request.key));
  }
  if (is_to_write) write();
}

void MultiplexCall::drop(MultiplexedRequest& request, Failure (*why)(std::string request_id)) {
  bool is_to_write = false;
  {
    const std::lock_guard lock(mutex_);
    if (requests_.erase(request.key) == 0) return;
    request.inbox.end(why(request.request_id), /*is_urgent=*/true);
    left_.insert(request.key);
    is_to_write = enqueue(cancel_command(request.key));
  }
  if (is_to_write) write();
}

void MultiplexCall::retire() {
  bool is_to_write = false;
  {
    const std::lock_guard lock(mutex_);
    is_retired_ = true;
    is_to_write = should_close();
  }
  if (is_to_write) write();
}

bool MultiplexCall::enqueue(v1::MultiplexRequest command) {
  if (has_ended_ || is_closing_ || is_write_broken_) return false;
  commands_.push_back(std::move(command));
  if (is_writing_) return false;
  is_writing_ = true;
  AddHold();
  return true;
}

bool MultiplexCall::should_close() {
  const bool is_idle = !is_writing_ && !is_closing_ && !has_ended_;
  if (!is_retired_ || !requests_.empty() || !is_idle) return false;
  is_closing_ = true;
  AddHold();
  return true;
}

void MultiplexCall::write() {
  // The thread that has set is_writing_ or is_closing_ is the only one here. The front command
  // keeps its address until it is sent, because a deque does not move its elements.
  const v1::MultiplexRequest* command = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!is_closing_) command = &commands_.front();
  }
  if (command == nullptr) {
    StartWritesDone();
  } else {
    StartWrite(command);
  }
}

void MultiplexCall::OnWriteDone(bool is_sent) {
  bool is_to_write = false;
  {
    const std::lock_guard lock(mutex_);
    commands_.pop_front();
    if (!is_sent) {
      // The call has ended; OnDone has its status with the reason.
      commands_.clear();
      is_write_broken_ = true;
      takes_no_more_ = true;
    }
    is_writing_ = !commands_.empty();
    is_to_write = is_writing_;
    if (is_to_write) AddHold();
    if (!is_to_write) is_to_write = should_close();
  }
  if (is_to_write) write();
  RemoveHold();
}

void MultiplexCall::OnReadDone(bool is_there) {
  bool is_to_write = false;
  {
    const std::lock_guard lock(mutex_);
    if (is_there) {
      for (const auto& event : response_.events()) hand_out(event);
      is_to_write = should_close();
    } else {
      has_ended_ = true;
    }
  }
  if (!is_there) {
    RemoveHold();
    return;
  }
  if (is_to_write) write();
  if (broken_.has_value()) context_->TryCancel();
  StartRead(&response_);
}

void MultiplexCall::hand_out(const v1::MultiplexEvent& event) {
  const bool is_last = event.has_error() || event.response().has_finished();
  const auto found = requests_.find(event.key());
  if (found == requests_.end()) {
    const bool is_ours = left_.contains(event.key());
    if (is_last) left_.erase(event.key());
    if (!is_ours) {
      broken_ = Failure{.code = grpc::StatusCode::DATA_LOSS,
                        .message = "an event of a request that is not open, with the key " +
                                   std::to_string(event.key())};
      takes_no_more_ = true;
    }
    return;
  }
  const auto request = found->second;
  if (is_last) requests_.erase(found);
  if (event.has_response()) {
    if (request->request_id.empty()) request->request_id = event.response().accepted().request_id();
    request->inbox.put(v1::GenerateResponse(event.response()));
    if (is_last) request->inbox.end({});
  } else if (event.has_error()) {
    Failure failure = failure_of_status(event.error(), request->request_id);
    takes_no_more_ = takes_no_more_ || failure.reason == "DRAINING";
    request->inbox.end(std::move(failure));
  }
}

void MultiplexCall::OnDone(const grpc::Status& status) {
  const std::lock_guard lock(mutex_);
  const Failure failure = explained(status);
  for (const auto& [key, request] : requests_) {
    Failure own = failure;
    own.request_id = request->request_id;
    request->inbox.end(std::move(own));
  }
  requests_.clear();
  has_ended_ = true;
  is_done_ = true;
  change_.notify_all();
}

Failure MultiplexCall::explained(const grpc::Status& status) const {
  if (broken_.has_value()) return *broken_;
  if (status.ok()) {
    return {.code = grpc::StatusCode::UNAVAILABLE,
            .message = "the server ended the Multiplex call"};
  }
  Failure failure = failure_of_call(status, *context_);
  if (failure.code == grpc::StatusCode::UNIMPLEMENTED && failure.reason.empty()) {
    failure.message = "the server does not offer Multiplex: use a client without `multiplex`";
  }
  return cancelled_to_unavailable(std::move(failure));
}

}  // namespace penstock
