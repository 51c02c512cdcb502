// A client of penstock.v1.GenerationService: streams, retries, resumption, Multiplex, credentials.
//
// Requests and events are the messages of the contract (protos/penstock/v1); requests.h makes the
// usual ones.
#pragma once

#include <grpcpp/channel.h>

#include <chrono>
#include <memory>
#include <string>

#include "penstock/error.h"
#include "penstock/options.h"
#include "penstock/stream.h"

namespace penstock {

// Threads may share one. Streams keep what they need of it, and may outlive it.
class Client {
 public:
  class Core;

  // `address`: HOST, HOST:PORT (50051 for a host alone), [IPV6]:PORT or a gRPC target. Throws
  // std::invalid_argument naming the option that is off, or a file that cannot be read.
  explicit Client(const std::string& address, ClientOptions options = {});
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  // Streams a generation, which is sent at once. Where `request` has a resume_timeout, the
  // stream continues over lost connections.
  [[nodiscard]] Stream generate(v1::GenerateRequest request, CallOptions options = {});
  // The whole answer. Throws Error.
  v1::GenerateOnceResponse generate_once(const v1::GenerateRequest& request,
                                         const CallOptions& options = {});
  // Continues with a request from a point on, in this process or another. `grace`: for how long
  // lost connections are made good.
  [[nodiscard]] Stream resume(const ResumePoint& point, std::chrono::nanoseconds grace,
                              CallOptions options = {});
  // Where the request stood when it was cancelled. Throws Error.
  v1::RequestState cancel(const std::string& request_id, const CallOptions& options = {});

  // For stubs of the contract's other services.
  [[nodiscard]] std::shared_ptr<grpc::Channel> channel() const;

 private:
  std::shared_ptr<Core> core_;
};

}  // namespace penstock
