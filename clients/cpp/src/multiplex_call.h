// One Multiplex call on gRPC's callback API: its reads, its writes, its requests by key.
#pragma once

#include <grpcpp/support/client_callback.h>

#include <unordered_map>
#include <unordered_set>

#include "multiplex.h"

namespace penstock {

// One request on a call: its messages that were received and not taken yet, and its credit.
struct MultiplexedRequest {
  std::uint64_t key = 0;
  Clock::time_point deadline = Clock::time_point::max();
  // 0: the caller grants the credit.
  std::uint32_t top_up_tokens = 0;
  Inbox inbox{};
  // Both are protected by the mutex of the call.
  std::string request_id{};
  std::uint32_t num_taken_tokens = 0;
};

class MultiplexCall final
    : private grpc::ClientBidiReactor<v1::MultiplexRequest, v1::MultiplexResponse> {
 public:
  MultiplexCall(v1::GenerationService::Stub& stub, std::unique_ptr<grpc::ClientContext> context,
                const MultiplexOptions& options, Clock::time_point now);
  MultiplexCall(const MultiplexCall&) = delete;
  MultiplexCall& operator=(const MultiplexCall&) = delete;
  // Ends the call.
  ~MultiplexCall() override;

  [[nodiscard]] bool can_submit(Clock::time_point now);
  [[nodiscard]] bool has_ended();
  std::shared_ptr<MultiplexedRequest> submit(Submission submission, Clock::time_point now);
  // Grants credit for the tokens taken, when there are enough for a message.
  void taken(MultiplexedRequest& request, std::uint32_t num_tokens);
  void give_credit(const MultiplexedRequest& request, std::uint32_t num_tokens);
  // Requests the server to end the request, which then sends its last message.
  void stop(const MultiplexedRequest& request);
  // Ends a request with the error `why`, on the server too if it is still open.
  void drop(MultiplexedRequest& request, Failure (*why)(std::string request_id));
  // Accepts no more requests. The call ends with its last request.
  void retire();

 private:
  using Commands = std::deque<v1::MultiplexRequest>;

  // Both require the mutex. write() is called without it if enqueue() returned true.
  [[nodiscard]] bool enqueue(v1::MultiplexRequest command);
  [[nodiscard]] bool should_close();
  void write();
  void hand_out(const v1::MultiplexEvent& event);
  [[nodiscard]] Failure explained(const grpc::Status& status) const;

  void OnReadDone(bool is_there) override;
  void OnWriteDone(bool is_sent) override;
  void OnWritesDoneDone(bool) override { this->RemoveHold(); }
  void OnDone(const grpc::Status& status) override;

  const MultiplexOptions options_;
  const Clock::time_point expires_at_;
  std::unique_ptr<grpc::ClientContext> context_;
  v1::MultiplexResponse response_{};

  std::mutex mutex_;
  std::condition_variable change_;
  Commands commands_{};
  std::unordered_map<std::uint64_t, std::shared_ptr<MultiplexedRequest>> requests_{};
  // Cancelled by this client, and not ended by the server yet.
  std::unordered_set<std::uint64_t> left_{};
  std::optional<Failure> broken_{};
  std::uint64_t next_key_ = 1;
  bool is_writing_ = false;
  bool is_closing_ = false;
  bool is_retired_ = false;
  bool is_write_broken_ = false;
  bool takes_no_more_ = false;
  bool has_ended_ = false;
  bool is_done_ = false;
};

}  // namespace penstock
