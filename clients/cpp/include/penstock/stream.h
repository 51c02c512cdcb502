// The events of one generation, in order and without a gap, over as many attempts as it takes.
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

// How far a request's stream was read: all that another process needs to continue with it.
struct ResumePoint {
  std::string request_id{};
  // Of the next message.
  std::uint64_t next_sequence = 0;
  // Tokens of each output so far.
  std::vector<std::uint32_t> received_token_counts{};
};

// Reads as a range, `for (const auto& event : stream)`, or by next(). A stream that ends without an
// exception is complete: `finished` is delivered once the status is OK.
//
// One thread reads; cancel() may be called from any. Leaving early (the destructor) cancels the
// request on the server, also where it asked to outlive its call; detach() lets it live.
class Stream {
 public:
  class Journey;
  class Iterator;

  explicit Stream(std::unique_ptr<Journey> journey);
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  // The next event; none after the last one. Throws Error, StreamBroken.
  [[nodiscard]] std::optional<v1::GenerateResponse> next();
  // Whether next() would answer at once, waiting up to `patience` for that. Retries continue here
  // too.
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds patience);
  // The text of output 0 from here to the end.
  [[nodiscard]] std::string text();

  // Ends the request; next() throws Error with CANCELLED.
  void cancel() noexcept;
  // Asks the server to end the request: the stream ends well, FINISH_REASON_CANCELLED, with what
  // was generated until then. To be called by the thread that reads, once `accepted` came.
  void stop();
  // Gives the stream up without ending the request, which lives for its resume_timeout.
  ResumePoint detach();
  // Behind the event that next() gave last.
  [[nodiscard]] ResumePoint point() const;

  // Allows a multiplexed request more output; see CallOptions::num_credit_tokens.
  void give_credit(std::uint32_t num_tokens);
  // What the server sent ahead of the events of the current attempt; waits for it. Empty with
  // multiplex, where the call is shared.
  [[nodiscard]] std::multimap<std::string, std::string> initial_metadata();
  // Attempts that failed so far and are made good: by a retry, or a Resume.
  [[nodiscard]] int num_lost_attempts() const;

  Iterator begin();
  std::default_sentinel_t end() { return {}; }

 private:
  std::unique_ptr<Journey> journey_;
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
