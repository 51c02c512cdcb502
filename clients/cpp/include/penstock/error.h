// What a failed call states, as one exception. Owns no decision: retry.h states what is tried
// again.
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

// A field of the request and what is wrong with it. `field` is a path inside the request message,
// such as "sampling.temperature".
struct FieldViolation {
  std::string field{};
  std::string description{};
};

// The status of a call with its google.rpc details.
struct Failure {
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  // For people.
  std::string message{};
  // For programs: a name of penstock.v1.ErrorReason without its prefix, such as "QUEUE_FULL".
  // Empty where the server gave none.
  std::string reason{};
  // What belongs to the reason; error.proto names the keys.
  std::map<std::string, std::string> metadata{};
  // When it is worth coming again, as the server states.
  std::optional<std::chrono::nanoseconds> retry_after{};
  // The server asks not to come again at all.
  bool is_retry_refused = false;
  std::vector<FieldViolation> field_violations{};
  // Empty as long as the server did not report it.
  std::string request_id{};
};

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

// A stream that does not keep the contract: a gap, a wrong order, an end without `finished`. Its
// code is DATA_LOSS, which no server sends.
class StreamBroken : public Error {
 public:
  StreamBroken(const std::string& message, std::string request_id);
};

}  // namespace penstock
