#include "status.h"

#include <google/rpc/error_details.pb.h>

#include <algorithm>
#include <charconv>
#include <utility>

namespace penstock {
namespace {

constexpr auto kDomain = "penstock.dev";
constexpr auto kPushbackKey = "grpc-retry-pushback-ms";
constexpr int kMaxCode = grpc::StatusCode::UNAUTHENTICATED;

void read_retry_info(const google::rpc::RetryInfo& info, Failure& failure) {
  const auto delay = std::chrono::seconds(info.retry_delay().seconds()) +
                     std::chrono::nanoseconds(info.retry_delay().nanos());
  failure.retry_after = std::max(delay, std::chrono::nanoseconds::zero());
}

void read_detail(const google::protobuf::Any& detail, Failure& failure) {
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  google::rpc::BadRequest bad_request;
  google::rpc::RequestInfo request;
  if (detail.UnpackTo(&info)) {
    if (info.domain() == kDomain) {
      failure.reason = info.reason();
      failure.metadata = {info.metadata().begin(), info.metadata().end()};
    }
  } else if (detail.UnpackTo(&retry)) {
    read_retry_info(retry, failure);
  } else if (detail.UnpackTo(&bad_request)) {
    for (const auto& violation : bad_request.field_violations()) {
      failure.field_violations.push_back(
          {.field = violation.field(), .description = violation.description()});
    }
  } else if (detail.UnpackTo(&request) && !request.request_id().empty()) {
    failure.request_id = request.request_id();
  }
}

}  // namespace

void read_pushback(const std::string& value, Failure& failure) {
  std::int64_t pushback_ms = -1;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, pushback_ms);
  // Limited to a day, which is longer than any client waits, so that nanoseconds do not overflow.
  constexpr std::int64_t kMostMs = 86'400'000;
  if (error != std::errc() || stop != end || pushback_ms < 0) {
    failure.is_retry_forbidden = true;
    return;
  }
  const std::chrono::nanoseconds pushback =
      std::chrono::milliseconds(std::min(pushback_ms, kMostMs));
  failure.retry_after = std::max(failure.retry_after.value_or(pushback), pushback);
}

Failure failure_of_status(const google::rpc::Status& status, const std::string& request_id) {
  const bool is_known = status.code() > grpc::StatusCode::OK && status.code() <= kMaxCode;
  Failure failure{
      .code = is_known ? static_cast<grpc::StatusCode>(status.code()) : grpc::StatusCode::UNKNOWN,
      .message = status.message(),
      .request_id = request_id,
  };
  for (const auto& detail : status.details()) read_detail(detail, failure);
  return failure;
}

Failure failure_of_call(const grpc::Status& status, const grpc::ClientContext& context,
                        const std::string& request_id) {
  // This message has the field numbers of google.rpc.Status, as error.proto guarantees, so it
  // parses the same bytes.
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) details.Clear();
  details.set_code(status.error_code());
  details.set_message(status.error_message());
  Failure failure = failure_of_status(details, request_id);
  for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
    if (key == kPushbackKey) read_pushback({value.data(), value.size()}, failure);
  }
  return failure;
}

Failure cancelled_to_unavailable(Failure failure) {
  if (failure.code == grpc::StatusCode::CANCELLED && failure.reason.empty()) {
    failure.code = grpc::StatusCode::UNAVAILABLE;
    failure.message = "the server or a proxy cancelled the call, not this client";
  }
  return failure;
}

Failure cancelled(std::string request_id) {
  return {.code = grpc::StatusCode::CANCELLED,
          .message = "the client cancelled the request",
          .request_id = std::move(request_id)};
}

Failure deadline_passed(std::string request_id) {
  return {.code = grpc::StatusCode::DEADLINE_EXCEEDED,
          .message = "the call's deadline passed",
          .request_id = std::move(request_id)};
}

namespace {

std::string code_name(grpc::StatusCode code) {
  static const char* const kNames[] = {"OK",
                                       "CANCELLED",
                                       "UNKNOWN",
                                       "INVALID_ARGUMENT",
                                       "DEADLINE_EXCEEDED",
                                       "NOT_FOUND",
                                       "ALREADY_EXISTS",
                                       "PERMISSION_DENIED",
                                       "RESOURCE_EXHAUSTED",
                                       "FAILED_PRECONDITION",
                                       "ABORTED",
                                       "OUT_OF_RANGE",
                                       "UNIMPLEMENTED",
                                       "INTERNAL",
                                       "UNAVAILABLE",
                                       "DATA_LOSS",
                                       "UNAUTHENTICATED"};
  const bool is_known = code >= 0 && code <= kMaxCode;
  return is_known ? kNames[code] : "UNKNOWN";
}

std::string words_of(const Failure& failure) {
  std::string words = code_name(failure.code);
  if (!failure.reason.empty()) words += " (" + failure.reason + ")";
  return failure.message.empty() ? words : words + ": " + failure.message;
}

}  // namespace

Error::Error(Failure failure)
    : std::runtime_error(words_of(failure)),
      failure_(std::make_shared<const Failure>(std::move(failure))) {}

StreamBroken::StreamBroken(const std::string& message, std::string request_id)
    : Error({.code = grpc::StatusCode::DATA_LOSS,
             .message = message,
             .request_id = std::move(request_id)}) {}

}  // namespace penstock
