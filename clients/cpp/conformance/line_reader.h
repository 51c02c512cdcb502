// Reads the program's stdin line by line, with a time limit.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace conformance {

class LineReader {
 public:
  // Returns the next line without its end; none at the end of stdin, or after `timeout`. Without
  // `timeout` there is no time limit.
  std::optional<std::string> next(std::optional<std::chrono::milliseconds> timeout = {});

 private:
  std::string buffer_;
  bool has_ended_ = false;
};

}  // namespace conformance
