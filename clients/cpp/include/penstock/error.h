// The exception of a failed call. retry.h decides which failures are retried.
#pragma once

#include <grpcpp/support/status_code_enum.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock {

// An invalid field of a request, and the reason. `field` is a path in the request message, such as
// "sampling.temperature".
struct FieldViolation {
  std::string field{};
  std::string description{};
};

// The status of a call with its google.rpc details.
struct Failure {
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  // For humans.
  std::string message{};
  // For programs: a name of penstock.v1.ErrorReason without its prefix, such as "QUEUE_FULL". Empty
  // if the server sent none.
  std::string reason{};
  // Further values for the reason; error.proto defines the keys.
  std::map<std::string, std::string> metadata{};
  // The delay that the server suggests before a retry.
  std::optional<std::chrono::nanoseconds> retry_after{};
  // True if the server requested that the call is not retried.
  bool is_retry_forbidden = false;
  std::vector<FieldViolation> field_violations{};
  // Empty if the server has not reported it.
  std::string request_id{};
};

// A failed call.
class Error : public std::runtime_error {
 public:
  explicit Error(Failure failure);

  [[nodiscard]] const Failure& failure() const noexcept { return *failure_; }
  [[nodiscard]] grpc::StatusCode code() const noexcept { return failure_->code; }
  [[nodiscard]] const std::string& reason() const noexcept { return failure_->reason; }

 private:
  // Shared, so that copying an exception cannot throw.
  std::shared_ptr<const Failure> failure_;
};

// A stream that violates the protocol: a gap, a wrong order, or an end without `finished`. Its code
// is DATA_LOSS, which no server sends.
class StreamBroken : public Error {
 public:
  StreamBroken(const std::string& message, std::string request_id);
};

}  // namespace penstock
