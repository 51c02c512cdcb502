#include "multiplex.h"

#include <utility>

#include "multiplex_call.h"
#include "status.h"

namespace penstock {
namespace {

// A request on a Multiplex call, with the interface of a separate call.
class MultiplexedSource final : public Source {
 public:
  MultiplexedSource(std::shared_ptr<MultiplexCall> call,
                    std::shared_ptr<MultiplexedRequest> request)
      : call_(std::move(call)), request_(std::move(request)) {}
  ~MultiplexedSource() override { MultiplexedSource::cancel(); }

  bool wait_until(Clock::time_point until) override {
    if (request_->inbox.wait_until(std::min(until, request_->deadline))) return true;
    if (until < request_->deadline) return false;
    // The server enforces the deadline too; this is for a server that does not respond.
    call_->drop(*request_, deadline_passed);
    return true;
  }

  std::optional<v1::GenerateResponse> take() override {
    wait_until(Clock::time_point::max());
    auto response = request_->inbox.take();
    if (response.has_value()) call_->taken(*request_, response->tokens().num_tokens());
    return response;
  }

  void cancel() noexcept override { call_->drop(*request_, cancelled); }
  bool stop() override {
    call_->stop(*request_);
    return true;
  }
  void give_credit(std::uint32_t num_tokens) override { call_->give_credit(*request_, num_tokens); }
  std::multimap<std::string, std::string> initial_metadata() override { return {}; }

 private:
  std::shared_ptr<MultiplexCall> call_;
  std::shared_ptr<MultiplexedRequest> request_;
};

}  // namespace

Multiplexer::Multiplexer(std::shared_ptr<v1::GenerationService::Stub> stub,
                         MultiplexOptions options)
    : stub_(std::move(stub)), options_(options) {}

Multiplexer::~Multiplexer() = default;

bool Multiplexer::has_current() {
  std::erase_if(calls_, [](const auto& call) { return call->has_ended(); });
  const auto now = Clock::now();
  for (const auto& call : calls_) {
    if (!call->can_submit(now)) call->retire();
  }
  return !calls_.empty() && calls_.back()->can_submit(now);
}

void Multiplexer::begin(std::unique_ptr<grpc::ClientContext> context) {
  calls_.push_back(
      std::make_shared<MultiplexCall>(*stub_, std::move(context), options_, Clock::now()));
}

std::unique_ptr<Source> Multiplexer::submit(Submission submission) {
  const auto& call = calls_.back();
  auto request = call->submit(std::move(submission), Clock::now());
  return std::make_unique<MultiplexedSource>(call, std::move(request));
}

}  // namespace penstock
