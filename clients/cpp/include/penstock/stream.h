// The events of one generation, in order and without gaps, over as many attempts as needed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/v1/generation_service.pb.h"

namespace penstock {

// The position up to which the stream of a request was read. With it another process can continue
// the stream.
struct ResumePoint {
  std::string request_id{};
  // Sequence number of the next message.
  std::uint64_t next_sequence = 0;
  // Number of tokens received of each output.
  std::vector<std::uint32_t> received_token_counts{};
};

// A stream is read as a range, `for (const auto& event : stream)`, or by next(). A stream that ends
// without an exception is complete: `finished` is delivered only after the status OK.
//
// One thread reads; any thread may call cancel(). The destructor of a stream that has not ended
// cancels the request on the server, even if the request has a resume_timeout; detach() lets the
// request continue.
class Stream {
 public:
  class Impl;
  class Iterator;

  explicit Stream(std::unique_ptr<Impl> impl);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  // Returns the next event; none after the last one. Throws Error and StreamBroken.
  [[nodiscard]] std::optional<v1::GenerateResponse> next();
  // Returns whether next() would return immediately; waits up to `timeout` for that. Retries
  // continue meanwhile.
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds timeout);
  // Returns the text of output 0 from here to the end.
  [[nodiscard]] std::string text();

  // Cancels the call. next() then throws Error with CANCELLED.
  void cancel() noexcept;
  // Ends the request on the server. The stream then ends without an error, with
  // FINISH_REASON_CANCELLED and the text so far. Call this on the thread that reads, after
  // `accepted`.
  void stop();
  // Closes the stream without ending the request, which continues for its resume_timeout.
  ResumePoint detach();
  // The position after the event that next() returned last.
  [[nodiscard]] ResumePoint point() const;

  // Allows the server to send more output of a multiplexed request; see
  // CallOptions::num_credit_tokens.
  void give_credit(std::uint32_t num_tokens);
  // Returns the initial metadata of the current attempt; waits for it. Empty with multiplex,
  // because the call is shared.
  [[nodiscard]] std::multimap<std::string, std::string> initial_metadata();
  // Number of attempts that have failed so far and were followed by a retry or a Resume.
  [[nodiscard]] int num_lost_attempts() const;

  Iterator begin();
  std::default_sentinel_t end() { return {}; }

 private:
  std::unique_ptr<Impl> impl_;
};

class Stream::Iterator {
 public:
  using iterator_concept = std::input_iterator_tag;
  using value_type = v1::GenerateResponse;
  using difference_type = std::ptrdiff_t;

  Iterator() = default;
  explicit Iterator(Stream& stream) : stream_(&stream), event_(stream.next()) {}

  const v1::GenerateResponse& operator*() const { return *event_; }
  const v1::GenerateResponse* operator->() const { return &*event_; }
  Iterator& operator++() {
    event_ = stream_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return !event_.has_value(); }

 private:
  Stream* stream_ = nullptr;
  std::optional<v1::GenerateResponse> event_{};
};

inline Stream::Iterator Stream::begin() {
  return Iterator(*this);
}

}  // namespace penstock
