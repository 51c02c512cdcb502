// Checks that a stream keeps the contract: order, sequence numbers, exactly one end. No I/O.
#pragma once

#include <optional>
#include <string>

#include "penstock/stream.h"

namespace penstock {

class StreamReader {
 public:
  StreamReader() = default;
  // Continues from where an earlier reader had come.
  explicit StreamReader(ResumePoint start) : point_(std::move(start)) {}

  // Takes the next message; whether it is to be delivered now. `finished` is held back for end().
  // Throws StreamBroken.
  bool receive(const v1::GenerateResponse& response);
  // The stream ended with status OK: the last event. Throws StreamBroken if there is none.
  [[nodiscard]] v1::GenerateResponse end();

  // Where the stream continues; a `finished` counts once its status is OK.
  [[nodiscard]] const ResumePoint& point() const { return point_; }
  // Where the next attempt resumes: before a `finished` whose status was lost.
  [[nodiscard]] const ResumePoint& next_point() {
    finished_.reset();
    return point_;
  }
  // From then on the call must not be tried again.
  [[nodiscard]] bool has_output() const { return has_output_; }

 private:
  [[noreturn]] void fail(const std::string& message) const;

  ResumePoint point_{};
  bool has_output_ = false;
  std::optional<v1::GenerateResponse> finished_{};
};

}  // namespace penstock
