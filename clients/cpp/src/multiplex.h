// Many requests over one Multiplex call: keys, credit, and the routing of events to requests.
#pragma once

#include <grpcpp/client_context.h>

#include <memory>
#include <mutex>
#include <vector>

#include "penstock/options.h"
#include "penstock/v1/generation_service.grpc.pb.h"
#include "source.h"

namespace penstock {

class MultiplexCall;

// The options with which a request is submitted on a Multiplex call.
struct Submission {
  v1::GenerateRequest generation{};
  Clock::time_point deadline = Clock::time_point::max();
  std::string traceparent{};
  // As in CallOptions.
  std::optional<std::uint32_t> num_credit_tokens{};
};

// The Multiplex calls of one channel: the current call, and older calls with open requests.
// Thread-safe.
class Multiplexer {
 public:
  Multiplexer(std::shared_ptr<v1::GenerationService::Stub> stub, MultiplexOptions options);
  ~Multiplexer();

  // Starts a request. `make_context` opens a new call if the current call does not accept it.
  // Throws Error for a request that is too large or has no time left.
  template <typename MakeContext>
  std::unique_ptr<Source> open(Submission submission, MakeContext make_context) {
    const std::lock_guard lock(mutex_);
    if (!has_current()) begin(make_context());
    return submit(std::move(submission));
  }

 private:
  // Also retires calls that accept no more requests, and removes those that have ended.
  bool has_current();
  void begin(std::unique_ptr<grpc::ClientContext> context);
  std::unique_ptr<Source> submit(Submission submission);

  std::shared_ptr<v1::GenerationService::Stub> stub_;
  MultiplexOptions options_;
  std::mutex mutex_;
  // The last one is the current call.
  std::vector<std::shared_ptr<MultiplexCall>> calls_;
};

}  // namespace penstock
