#include "multiplex.h"

#include <utility>

#include "multiplex_call.h"
#include "status.h"

namespace penstock {
namespace {

// A request on a Multiplex call, with the interface of a separate call.
class LaneSource final : public Source {
 public:
  LaneSource(std::shared_ptr<MultiplexCall> call, std::shared_ptr<Lane> lane)
      : call_(std::move(call)), lane_(std::move(lane)) {}
  ~LaneSource() override { LaneSource::cancel(); }

  bool wait_until(Clock::time_point until) override {
    if (lane_->inbox.wait_until(std::min(until, lane_->deadline))) return true;
    if (until < lane_->deadline) return false;
    // The server enforces the deadline too; this is for a server that does not respond.
    call_->drop(*lane_, deadline_passed);
    return true;
  }

  std::optional<v1::GenerateResponse> take() override {
    wait_until(Clock::time_point::max());
    auto response = lane_->inbox.take();
    if (response.has_value()) call_->taken(*lane_, response->tokens().num_tokens());
    return response;
  }

  void cancel() noexcept override { call_->drop(*lane_, cancelled); }
  bool stop() override {
    call_->stop(*lane_);
    return true;
  }
  void give_credit(std::uint32_t num_tokens) override { call_->give_credit(*lane_, num_tokens); }
  std::multimap<std::string, std::string> initial_metadata() override { return {}; }

 private:
  std::shared_ptr<MultiplexCall> call_;
  std::shared_ptr<Lane> lane_;
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
  auto lane = call->submit(std::move(submission), Clock::now());
  return std::make_unique<LaneSource>(call, std::move(lane));
}

}  // namespace penstock
