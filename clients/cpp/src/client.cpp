#include "penstock/client.h"

#include <utility>

#include "core.h"
#include "stream_impl.h"
#include "unicode.h"

namespace penstock {
namespace {

// Sends the request. The first read reports an immediate failure.
Stream begun(std::unique_ptr<Stream::Impl> impl) {
  impl->advance(Clock::now());
  return Stream(std::move(impl));
}

}  // namespace

Client::Client(const std::string& address, ClientOptions options)
    : core_(std::make_shared<Core>(address, std::move(options))) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

Stream Client::generate(v1::GenerateRequest request, CallOptions options) {
  return begun(std::make_unique<Stream::Impl>(core_, std::move(request), std::move(options)));
}

v1::GenerateOnceResponse Client::generate_once(const v1::GenerateRequest& request,
                                               const CallOptions& options) {
  require_utf8(request);
  v1::GenerateOnceRequest once;
  *once.mutable_generation() = request;
  v1::GenerateOnceResponse response;
  core_->unary(options, [&](grpc::ClientContext& context) {
    return core_->stub().GenerateOnce(&context, once, &response);
  });
  return response;
}

Stream Client::resume(const ResumePoint& point, std::chrono::nanoseconds resume_timeout,
                      CallOptions options) {
  return begun(std::make_unique<Stream::Impl>(core_, point, resume_timeout, std::move(options)));
}

v1::RequestState Client::cancel(const std::string& request_id, const CallOptions& options) {
  return core_->cancel(request_id, options);
}

std::shared_ptr<grpc::Channel> Client::channel() const {
  return core_->channel();
}

}  // namespace penstock
