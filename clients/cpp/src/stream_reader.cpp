#include "stream_reader.h"

#include <cstddef>

#include "penstock/error.h"

namespace penstock {
namespace {

// More than any server allows. A wrong index from a server must not allocate memory.
constexpr std::size_t kMaxOutputs = 65536;

}  // namespace

bool StreamReader::receive(const v1::GenerateResponse& response) {
  if (finished_.has_value()) fail("received a message after `finished`");
  if (response.sequence() != point_.next_sequence) {
    fail("expected message " + std::to_string(point_.next_sequence) + ", got " +
         std::to_string(response.sequence()));
  }
  if ((point_.next_sequence == 0) != response.has_accepted()) {
    fail("`accepted` must be the first message, once");
  }
  if (response.has_finished()) {
    finished_ = response;
    return false;
  }
  ++point_.next_sequence;
  if (response.has_tokens()) {
    has_output_ = true;
    const std::size_t index = response.tokens().output_index();
    if (index >= kMaxOutputs) fail("there is no output " + std::to_string(index));
    auto& counts = point_.received_token_counts;
    if (counts.size() <= index) counts.resize(index + 1);
    counts[index] += response.tokens().num_tokens();
  } else if (response.has_accepted()) {
    point_.request_id = response.accepted().request_id();
  } else if (response.has_prompt()) {
    has_output_ = true;
  }
  // An unknown event is counted and skipped.
  return response.event_case() != v1::GenerateResponse::EVENT_NOT_SET;
}

v1::GenerateResponse StreamReader::end() {
  if (!finished_.has_value()) {
    fail("the stream ended without `finished` after " + std::to_string(point_.next_sequence) +
         " messages");
  }
  ++point_.next_sequence;
  return *finished_;
}

void StreamReader::fail(const std::string& message) const {
  throw StreamBroken(message, point_.request_id);
}

}  // namespace penstock
