// Shared by the calls of a client: the channel, the stub, the options, the retry budget, Multiplex.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <functional>
#include <memory>
#include <string>

#include "multiplex.h"
#include "penstock/client.h"
#include "source.h"

namespace penstock {

// A uniform random number in [0, 1).
double draw_jitter();

class Client::Core {
 public:
  Core(const std::string& address, ClientOptions options);

  [[nodiscard]] const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  [[nodiscard]] v1::GenerationService::Stub& stub() { return *stub_; }
  [[nodiscard]] Attempts attempts(const CallOptions& options);
  // Throws std::invalid_argument for options that exclude each other.
  void check(const CallOptions& options) const;

  // Starts one attempt at a stream.
  std::unique_ptr<Source> generate(const v1::GenerateRequest& request, const CallOptions& options,
                                   Clock::time_point deadline);
  std::unique_ptr<Source> resume(const ResumePoint& point, const CallOptions& options,
                                 Clock::time_point deadline);
  v1::RequestState cancel(const std::string& request_id, const CallOptions& options);
  // Makes a call with one response, with retries by the policy. Throws Error.
  void unary(const CallOptions& options,
             const std::function<grpc::Status(grpc::ClientContext&)>& call);

 private:
  std::unique_ptr<grpc::ClientContext> context(const CallOptions& options,
                                               Clock::time_point deadline) const;
  Failure attempt(const CallOptions& options, Clock::time_point deadline,
                  const std::function<grpc::Status(grpc::ClientContext&)>& call);

  ClientOptions options_;
  RetryBudget budget_;
  std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<v1::GenerationService::Stub> stub_;
  std::optional<Multiplexer> multiplexer_{};
};

}  // namespace penstock
