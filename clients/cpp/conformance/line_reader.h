// The program's stdin, line by line and with a bound on the wait.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace conformance {

class LineReader {
 public:
  // The next line without its end; none at the end of stdin, or after `patience`. Waits for as long
  // as it takes without one.
  std::optional<std::string> next(std::optional<std::chrono::milliseconds> patience = {});

 private:
  std::string buffer_;
  bool has_ended_ = false;
};

}  // namespace conformance
