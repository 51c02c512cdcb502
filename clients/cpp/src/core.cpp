#include "core.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <stop_token>
#include <utility>

#include "credentials.h"
#include "server_stream.h"
#include "status.h"
#include "unicode.h"

namespace penstock {
namespace {

constexpr int kKeepaliveMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;

grpc::ChannelArguments channel_arguments(const ClientOptions& options, const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000);
  // Clients of one target would otherwise share one connection, and one front of the server.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(options.max_message_bytes);
  arguments.SetMaxSendMessageSize(options.max_message_bytes);
  const bool is_many = target.starts_with("dns:") || target.starts_with("ipv");
  if (is_many) arguments.SetLoadBalancingPolicyName("round_robin");
  if (options.tls.has_value() && !options.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  }
  return arguments;
}

void check_options(const ClientOptions& options) {
  const RetryPolicy& retry = options.retry;
  if (retry.max_attempts < 1) throw std::invalid_argument("retry.max_attempts: at least 1");
  if (!(retry.multiplier >= 1.0)) throw std::invalid_argument("retry.multiplier: at least 1");
  if (retry.initial_backoff.count() < 0 || retry.max_backoff.count() < 0) {
    throw std::invalid_argument("retry.initial_backoff, retry.max_backoff: must not be negative");
  }
  if (!(retry.pushback_jitter >= 0.0)) {
    throw std::invalid_argument("retry.pushback_jitter: must not be negative");
  }
  if (options.max_message_bytes < 1) throw std::invalid_argument("max_message_bytes: at least 1");
  if (!options.multiplex.has_value()) return;
  constexpr std::uint32_t kMostWindowTokens = 1U << 20;
  const auto window_tokens = options.multiplex->window_tokens;
  if (window_tokens < 1 || window_tokens > kMostWindowTokens) {
    throw std::invalid_argument("multiplex.window_tokens: from 1 to 1048576");
  }
  if (options.multiplex->max_call_age.count() < 1) {
    throw std::invalid_argument("multiplex.max_call_age: at least 1 s");
  }
}

bool names(const Metadata& metadata, const char* key) {
  return std::ranges::any_of(metadata, [&](const auto& pair) { return pair.first == key; });
}

}  // namespace

double draw_jitter() {
  thread_local std::mt19937_64 engine{std::random_device{}()};
  return std::uniform_real_distribution<double>(0.0, 1.0)(engine);
}

Client::Core::Core(const std::string& address, ClientOptions options)
    : options_(std::move(options)) {
  check_options(options_);
  const std::string target = grpc_target(address);
  check_token_is_safe(options_, target);
  channel_ = grpc::CreateCustomChannel(target, channel_credentials(options_.tls),
                                       channel_arguments(options_, target));
  stub_ = v1::GenerationService::NewStub(channel_);
  if (options_.multiplex.has_value()) {
    auto multiplex = *options_.multiplex;
    multiplex.max_request_bytes =
        std::min(multiplex.max_request_bytes, static_cast<std::size_t>(options_.max_message_bytes));
    multiplexer_.emplace(stub_, multiplex);
  }
}

Attempts Client::Core::attempts(const CallOptions& options) {
  return {options_.retry, budget_, options.timeout, Clock::now()};
}

void Client::Core::check(const CallOptions& options) const {
  if (multiplexer_.has_value() && !options.metadata.empty()) {
    throw std::invalid_argument(
        "metadata: not supported for one multiplexed request; set it on the client");
  }
  if (!multiplexer_.has_value() && options.num_credit_tokens.has_value()) {
    throw std::invalid_argument("num_credit_tokens: requires a client with multiplex");
  }
}

std::unique_ptr<grpc::ClientContext> Client::Core::context(const CallOptions& options,
                                                           Clock::time_point deadline) const {
  auto context = std::make_unique<grpc::ClientContext>();
  if (deadline != Clock::time_point::max()) {
    const auto left = deadline - Clock::now();
    context->set_deadline(std::chrono::system_clock::now() +
                          std::chrono::duration_cast<std::chrono::system_clock::duration>(left));
  }
  for (const auto& [key, value] : options_.metadata) context->AddMetadata(key, value);
  for (const auto& [key, value] : options.metadata) context->AddMetadata(key, value);
  const bool is_named =
      names(options_.metadata, "authorization") || names(options.metadata, "authorization");
  if (options_.token && !is_named) {
    context->AddMetadata("authorization", authorization(options_.token()));
  }
  if (!options.traceparent.empty()) context->AddMetadata("traceparent", options.traceparent);
  if (!options.tracestate.empty()) context->AddMetadata("tracestate", options.tracestate);
  return context;
}

std::unique_ptr<Source> Client::Core::generate(const v1::GenerateRequest& request,
                                               const CallOptions& options,
                                               Clock::time_point deadline) {
  // On a shared call this would end all other requests as well.
  require_utf8(request);
  if (multiplexer_.has_value()) {
    Submission submission{.generation = request,
                          .deadline = deadline,
                          .traceparent = options.traceparent,
                          .num_credit_tokens = options.num_credit_tokens};
    // The call is shared, so it has neither the deadline nor the trace of this request.
    return multiplexer_->open(std::move(submission),
                              [this] { return context({}, Clock::time_point::max()); });
  }
  return std::make_unique<ServerStream<v1::GenerateResponse>>(
      context(options, deadline), std::string(),
      [&](auto* call, auto* reactor) { stub_->async()->Generate(call, &request, reactor); });
}

std::unique_ptr<Source> Client::Core::resume(const ResumePoint& point, const CallOptions& options,
                                             Clock::time_point deadline) {
  v1::ResumeRequest request;
  request.set_request_id(point.request_id);
  request.set_next_sequence(point.next_sequence);
  request.mutable_received_token_counts()->Add(point.received_token_counts.begin(),
                                               point.received_token_counts.end());
  return std::make_unique<ServerStream<v1::ResumeResponse>>(
      context(options, deadline), point.request_id,
      // gRPC serialises the request before this returns.
      [&](auto* call, auto* reactor) { stub_->async()->Resume(call, &request, reactor); });
}

v1::RequestState Client::Core::cancel(const std::string& request_id, const CallOptions& options) {
  v1::CancelRequest request;
  v1::CancelResponse response;
  request.set_request_id(request_id);
  unary(options,
        [&](grpc::ClientContext& context) { return stub_->Cancel(&context, request, &response); });
  return response.state();
}

void Client::Core::unary(const CallOptions& options,
                         const std::function<grpc::Status(grpc::ClientContext&)>& call) {
  Attempts attempts = this->attempts(options);
  std::mutex mutex;
  std::condition_variable_any pause;
  while (true) {
    const Failure failure = attempt(options, attempts.deadline(), call);
    if (failure.code == grpc::StatusCode::OK) return;
    const auto delay =
        options.stop.stop_requested()
            ? std::nullopt
            : attempts.delay_after(failure, /*has_output=*/false, Clock::now(), draw_jitter());
    if (!delay.has_value()) throw Error(failure);
    std::unique_lock lock(mutex);
    pause.wait_for(lock, options.stop, *delay, [] { return false; });
    if (options.stop.stop_requested()) throw Error(cancelled(failure.request_id));
  }
}

Failure Client::Core::attempt(const CallOptions& options, Clock::time_point deadline,
                              const std::function<grpc::Status(grpc::ClientContext&)>& call) {
  const auto context = this->context(options, deadline);
  const std::stop_callback on_stop(options.stop, [&context] { context->TryCancel(); });
  const grpc::Status status = call(*context);
  if (status.ok()) return {.code = grpc::StatusCode::OK};
  Failure failure = failure_of_call(status, *context);
  const bool is_own_cancellation = options.stop.stop_requested() || !failure.request_id.empty();
  return is_own_cancellation ? failure : cancelled_to_unavailable(std::move(failure));
}

}  // namespace penstock
