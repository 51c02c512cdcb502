// A Generate or Resume call as a Source, on gRPC's callback API, without a waiting thread.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <memory>
#include <utility>

#include "penstock/v1/generation_service.grpc.pb.h"
#include "source.h"
#include "status.h"

namespace penstock {

inline v1::GenerateResponse&& message_of(v1::GenerateResponse& response) {
  return std::move(response);
}
inline v1::GenerateResponse&& message_of(v1::ResumeResponse& response) {
  return std::move(*response.mutable_response());
}

template <typename Response>
class ServerStream final : public Source, private grpc::ClientReadReactor<Response> {
 public:
  // `start(context, reactor)` starts the call. `request_id` is the id if it is known before.
  template <typename Start>
  ServerStream(std::unique_ptr<grpc::ClientContext> context, std::string request_id, Start start)
      : context_(std::move(context)), request_id_(std::move(request_id)) {
    start(context_.get(), static_cast<grpc::ClientReadReactor<Response>*>(this));
    // Reads are also started outside of reactions. The hold delays OnDone until there are none.
    this->AddHold();
    this->StartRead(&response_);
    this->StartCall();
  }

  ~ServerStream() override {
    cancel();
    std::unique_lock lock(mutex_);
    change_.wait(lock, [this] { return is_done_; });
  }

  bool wait_until(Clock::time_point until) override { return inbox_.wait_until(until); }

  std::optional<v1::GenerateResponse> take() override {
    auto response = inbox_.take();
    read_on();
    return response;
  }

  void cancel() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      if (is_done_) return;
      is_left_ = true;
    }
    context_->TryCancel();
    read_on();
  }

  bool stop() override { return false; }
  void give_credit(std::uint32_t) override {}

  std::multimap<std::string, std::string> initial_metadata() override {
    std::unique_lock lock(mutex_);
    change_.wait(lock, [this] { return has_metadata_ || is_done_; });
    return metadata_;
  }

 private:
  // Maximum number of buffered messages. At this number reading pauses, and gRPC slows down the
  // server.
  static constexpr std::size_t kMaxWaiting = 4;

  // Reads again after a pause. A cancelled call is read to its end, which follows soon.
  void read_on() {
    {
      const std::lock_guard lock(mutex_);
      if (!is_paused_) return;
      is_paused_ = false;
    }
    this->StartRead(&response_);
  }

  void OnReadInitialMetadataDone(bool is_there) override {
    const std::lock_guard lock(mutex_);
    if (is_there) {
      for (const auto& [key, value] : context_->GetServerInitialMetadata()) {
        metadata_.emplace(std::string(key.data(), key.size()),
                          std::string(value.data(), value.size()));
      }
    }
    has_metadata_ = true;
    change_.notify_all();
  }

  void OnReadDone(bool is_there) override {
    if (!is_there) {
      this->RemoveHold();
      return;
    }
    bool is_full = false;
    {
      const std::lock_guard lock(mutex_);
      v1::GenerateResponse&& message = message_of(response_);
      if (request_id_.empty()) request_id_ = message.accepted().request_id();
      if (!is_left_) is_full = inbox_.put(std::move(message)) >= kMaxWaiting;
      is_paused_ = is_full;
    }
    if (!is_full) this->StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    const std::lock_guard lock(mutex_);
    inbox_.end(status.ok() ? std::nullopt : std::optional(explained(status)));
    is_done_ = true;
    change_.notify_all();
  }

  [[nodiscard]] Failure explained(const grpc::Status& status) const {
    Failure failure = failure_of_call(status, *context_, request_id_);
    if (is_left_ || !request_id_.empty()) return failure;
    return cancelled_to_unavailable(std::move(failure));
  }

  std::unique_ptr<grpc::ClientContext> context_;
  Inbox inbox_;
  std::mutex mutex_;
  std::condition_variable change_;
  Response response_{};
  std::string request_id_;
  std::multimap<std::string, std::string> metadata_{};
  bool has_metadata_ = false;
  bool is_paused_ = false;
  bool is_left_ = false;
  bool is_done_ = false;
};

}  // namespace penstock
