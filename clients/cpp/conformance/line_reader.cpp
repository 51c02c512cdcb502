#include "line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <array>

namespace conformance {

std::optional<std::string> LineReader::next(std::optional<std::chrono::milliseconds> timeout) {
  const int timeout_ms = timeout.has_value() ? static_cast<int>(timeout->count()) : -1;
  while (true) {
    const auto end = buffer_.find('\n');
    if (end != std::string::npos || (has_ended_ && !buffer_.empty())) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end == std::string::npos ? end : end + 1);
      return line;
    }
    if (has_ended_) return {};
    pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (poll(&input, 1, timeout_ms) == 0) return {};
    std::array<char, 4096> bytes{};
    const auto num_read = read(STDIN_FILENO, bytes.data(), bytes.size());
    if (num_read <= 0) {
      has_ended_ = true;
    } else {
      buffer_.append(bytes.data(), static_cast<std::size_t>(num_read));
    }
  }
}

}  // namespace conformance
