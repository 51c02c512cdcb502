// Checks that a stream conforms to the protocol: order, sequence numbers, exactly one end. Does no
// I/O.
#pragma once

#include <optional>
#include <string>

#include "penstock/stream.h"

namespace penstock {

class StreamReader {
 public:
  StreamReader() = default;
  // Continues at the position of an earlier reader.
  explicit StreamReader(ResumePoint start) : point_(std::move(start)) {}

  // Checks the next message. Returns whether to deliver it now. `finished` is held back for end().
  // Throws StreamBroken.
  bool receive(const v1::GenerateResponse& response);
  // Returns the last event, after the stream has ended with status OK. Throws StreamBroken without
  // one.
  [[nodiscard]] v1::GenerateResponse end();

  // The position at which the stream continues. A `finished` is included only if the status is OK.
  [[nodiscard]] const ResumePoint& point() const { return point_; }
  // Returns where the next attempt resumes: before a `finished` whose status was lost.
  [[nodiscard]] const ResumePoint& next_point() {
    finished_.reset();
    return point_;
  }
  // True if output was delivered. From then on the call must not be retried.
  [[nodiscard]] bool has_output() const { return has_output_; }

 private:
  [[noreturn]] void fail(const std::string& message) const;

  ResumePoint point_{};
  bool has_output_ = false;
  std::optional<v1::GenerateResponse> finished_{};
};

}  // namespace penstock
