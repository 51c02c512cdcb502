// A client of penstock.v1.GenerationService: streams, retries, resumption, Multiplex, credentials.
//
// Requests and events are the messages of the API (protos/penstock/v1). requests.h creates common
// requests.
#pragma once

#include <grpcpp/channel.h>

#include <chrono>
#include <memory>
#include <string>

#include "penstock/error.h"
#include "penstock/options.h"
#include "penstock/stream.h"

namespace penstock {

// A client for one address. Threads may share it. Streams may outlive the client.
class Client {
 public:
  class Core;

  // `address` is HOST, HOST:PORT (the default port is 50051), [IPV6]:PORT or a gRPC target. Throws
  // std::invalid_argument, which names the invalid option or the file that cannot be read.
  explicit Client(const std::string& address, ClientOptions options = {});
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  // Streams a generation. The request is sent immediately. If it has a resume_timeout, the stream
  // reconnects by itself after a lost connection.
  [[nodiscard]] Stream generate(v1::GenerateRequest request, CallOptions options = {});
  // Returns the complete result. Throws Error.
  v1::GenerateOnceResponse generate_once(const v1::GenerateRequest& request,
                                         const CallOptions& options = {});
  // Continues the stream of a request from a point on, in this process or another. The stream
  // reconnects by itself for up to `resume_timeout` after a lost connection.
  [[nodiscard]] Stream resume(const ResumePoint& point, std::chrono::nanoseconds resume_timeout,
                              CallOptions options = {});
  // Cancels a request of the caller's tenant and returns its state before the cancellation. Throws
  // Error.
  v1::RequestState cancel(const std::string& request_id, const CallOptions& options = {});

  // Returns the channel, for generated stubs of the other services of the API.
  [[nodiscard]] std::shared_ptr<grpc::Channel> channel() const;

 private:
  std::shared_ptr<Core> core_;
};

}  // namespace penstock
