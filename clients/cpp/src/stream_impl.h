// One logical stream over all its attempts: a broken stream is resumed, is started again, or ends
// with the error.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <stop_token>

#include "core.h"
#include "penstock/stream.h"
#include "stream_reader.h"

namespace penstock {

class Stream::Impl {
 public:
  // The stream of `request`, or of the request that is resumed at `point`.
  Impl(std::shared_ptr<Client::Core> core, v1::GenerateRequest request, CallOptions options);
  Impl(std::shared_ptr<Client::Core> core, const ResumePoint& point, Nanoseconds resume_timeout,
       CallOptions options);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // Returns whether an event, the end or a failure is available; waits for it until `until`.
  bool advance(Clock::time_point until);
  std::optional<v1::GenerateResponse> take();
  void cancel() noexcept;
  void stop();
  ResumePoint detach();
  [[nodiscard]] const ResumePoint& point() const { return delivered_; }
  void give_credit(std::uint32_t num_tokens);
  std::multimap<std::string, std::string> initial_metadata();
  [[nodiscard]] int num_lost_attempts() const { return num_lost_attempts_; }

 private:
  struct CancelOnStop {
    Impl* impl;
    void operator()() const noexcept { impl->cancel(); }
  };

  [[nodiscard]] bool is_ready() const { return ready_.has_value() || failure_ || is_over_; }
  // Returns the current attempt, or none if the wait before the next one exceeds `until`.
  Source* source(Clock::time_point until);
  void begin();
  void read();
  void fail(const Error& error);
  [[nodiscard]] std::optional<Nanoseconds> delay_after(const Failure& failure);
  // Cancels a request that would continue after its call.
  void end_request() noexcept;

  std::shared_ptr<Client::Core> core_;
  std::optional<v1::GenerateRequest> request_;
  CallOptions options_;
  Attempts attempts_;
  Recovery recovery_;
  StreamReader reader_;
  ResumePoint delivered_{};
  std::optional<v1::GenerateResponse> ready_{};
  std::exception_ptr failure_{};
  Clock::time_point begins_at_{};
  int num_lost_attempts_ = 0;
  bool is_over_ = false;
  bool is_detached_ = false;

  // The members that cancel() uses, from any thread.
  std::mutex mutex_;
  std::condition_variable change_;
  std::unique_ptr<Source> source_{};
  bool is_cancelled_ = false;
  // Declared last, so that it is destroyed before the members that it uses.
  std::optional<std::stop_callback<CancelOnStop>> on_stop_{};
};

}  // namespace penstock
