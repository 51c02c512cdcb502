// Many requests over one Multiplex call: keys, credit, and which event belongs to whom.
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

// What a request on a Multiplex call is submitted with.
struct Submission {
  v1::GenerateRequest generation{};
  Clock::time_point deadline = Clock::time_point::max();
  std::string traceparent{};
  // As of CallOptions.
  std::optional<std::uint32_t> num_credit_tokens{};
};

// The Multiplex calls of one channel: the current one, and older ones that run out. Safe for
// threads.
class Multiplexer {
 public:
  Multiplexer(std::shared_ptr<v1::GenerationService::Stub> stub, MultiplexOptions options);
  ~Multiplexer();

  // Starts a request; `make_context` opens a new call where none takes it. Throws Error for a
  // request that is too large or has no time left.
  template <typename MakeContext>
  std::unique_ptr<Source> open(Submission submission, MakeContext make_context) {
    const std::lock_guard lock(mutex_);
    if (!has_current()) begin(make_context());
    return submit(std::move(submission));
  }

 private:
  // Also retires calls that take no more requests, and forgets those that have ended.
  bool has_current();
  void begin(std::unique_ptr<grpc::ClientContext> context);
  std::unique_ptr<Source> submit(Submission submission);

  std::shared_ptr<v1::GenerationService::Stub> stub_;
  MultiplexOptions options_;
  std::mutex mutex_;
  // The last one is the current one.
  std::vector<std::shared_ptr<MultiplexCall>> calls_;
};

}  // namespace penstock
