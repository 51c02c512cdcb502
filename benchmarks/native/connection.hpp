// One connection with its streams: gRPC (one call per stream), Multiplex (all streams in one
// call), server-sent events or lines. Passes each message and its stream to a listener.
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "wire.hpp"

enum class Mode { kGrpc, kMultiplex, kEvents, kLines };

struct Listener {
  virtual ~Listener() = default;
  // A message of a stream with the number of its tokens; `is_final` for a finished event.
  virtual void on_message(uint32_t stream, uint32_t num_tokens, bool is_final) = 0;
  virtual void on_end(uint32_t stream) = 0;
};

class Connection {
 public:
  // Streams `first` to `first + num - 1` of the listener; `request` is an encoded GenerateRequest.
  Connection(Mode mode, int port, uint32_t first, uint32_t num, std::string request,
             Listener& listener)
      : mode_(mode), first_(first), num_(num), request_(std::move(request)), listener_(listener) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      perror("connect");
      exit(3);
    }
    const int one = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd_, F_SETFL, O_NONBLOCK);
    if (mode_ == Mode::kGrpc || mode_ == Mode::kMultiplex) h2::put_preface(output_);
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }
  bool is_open() const { return is_open_; }
  uint64_t num_bytes() const { return num_bytes_; }
  bool has_output() const { return !output_.empty(); }

  // Send the request of every stream.
  void open_all() {
    switch (mode_) {
      case Mode::kGrpc:
        for (uint32_t i = 0; i < num_; ++i) open(first_ + i);
        break;
      case Mode::kMultiplex:
        open_multiplex();
        break;
      case Mode::kEvents:
        output_ += "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   "Content-Length: 18\r\n\r\n{\"prompt\":\"hello\"}";
        break;
      case Mode::kLines:
        output_ += "generate\n";
        break;
    }
    flush();
  }

  // Send the request of a stream (again) in a separate call.
  void open(uint32_t stream) {
    const uint32_t id = next_id();
    stream_of_.push_back(stream);
    partial_.emplace_back();
    is_live_.push_back(true);
    if (ids_.size() <= stream - first_) ids_.resize(stream - first_ + 1);
    ids_[stream - first_] = id;
    h2::put_grpc_call(output_, id, "/penstock.v1.GenerationService/Generate");
    h2::put_grpc_message(output_, id, request_, true);
  }

  // Reset the call of a stream, like a client that disconnects.
  void cancel(uint32_t stream) {
    const uint32_t id = ids_[stream - first_];
    is_live_[id / 2] = false;
    partial_[id / 2] = {};
    h2::put_frame(output_, h2::kReset, 0, id, h2::u32(h2::kCancel));
  }

  void flush() {
    size_t sent = 0;
    while (sent < output_.size()) {
      const ssize_t n = send(fd_, output_.data() + sent, output_.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) break;
      sent += size_t(n);
    }
    output_.erase(0, sent);
  }

  // Read the data that the socket has.
  void receive() {
    static uint8_t buffer[1 << 18];
    const ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) is_open_ = false;
    if (n <= 0) return;
    num_bytes_ += uint64_t(n);
    input_.insert(input_.end(), buffer, buffer + n);
    size_t used = 0;
    switch (mode_) {
      case Mode::kEvents: used = take_events(); break;
      case Mode::kLines: used = take_lines(); break;
      default: used = take_frames();
    }
    input_.erase(input_.begin(), input_.begin() + long(used));
    flush();
  }

 private:
  uint32_t next_id() { return 2 * uint32_t(stream_of_.size()) + 1; }

  void open_multiplex() {
    const uint32_t id = next_id();
    stream_of_.push_back(first_);
    partial_.emplace_back();
    is_live_.push_back(true);
    h2::put_grpc_call(output_, id, "/penstock.v1.GenerationService/Multiplex");
    for (uint32_t i = 0; i < num_; ++i) {
      std::string submit, command;
      proto::put_varint(submit, 1 << 3);
      proto::put_varint(submit, first_ + i);
      proto::put_bytes(submit, 2, request_);
      proto::put_bytes(command, 1, submit);
      h2::put_grpc_message(output_, id, command, false);
    }
  }

  size_t take_frames() {
    size_t used = 0;
    while (input_.size() - used >= h2::kFrameHeader) {
      const h2::Frame frame = h2::read_frame(input_.data() + used);
      const size_t size = h2::kFrameHeader + frame.length;
      if (input_.size() - used < size) break;
      take_frame(frame);
      used += size;
    }
    return used;
  }

  void take_frame(const h2::Frame& frame) {
    const bool is_ack = frame.flags & h2::kAck;
    switch (frame.type) {
      case h2::kData:
        take_data(frame);
        break;
      case h2::kHeaders:
        if (frame.flags & h2::kEndStream) end(frame.stream_id);
        break;
      case h2::kReset:
        end(frame.stream_id);
        break;
      case h2::kSettings:
        if (!is_ack) h2::put_frame(output_, h2::kSettings, h2::kAck, 0, "");
        break;
      case h2::kPing:
        if (!is_ack)
          h2::put_frame(output_, h2::kPing, h2::kAck, 0,
                        std::string(reinterpret_cast<const char*>(frame.payload), frame.length));
        break;
      case h2::kGoAway:
        fprintf(stderr, "the server goes away: code %u\n", h2::read_u32(frame.payload + 4));
        break;
    }
  }

  void take_data(const h2::Frame& frame) {
    const size_t index = frame.stream_id / 2;
    unacknowledged_ += frame.length;
    if (unacknowledged_ > 1u << 26) {
      h2::put_frame(output_, h2::kWindow, 0, 0, h2::u32(unacknowledged_));
      // All multiplexed streams share one call, so its flow-control window is replenished too.
      if (mode_ == Mode::kMultiplex && is_live_[index])
        h2::put_frame(output_, h2::kWindow, 0, frame.stream_id, h2::u32(unacknowledged_));
      unacknowledged_ = 0;
    }
    if (!is_live_[index]) return;
    // Moved out first, because a listener that opens another call may reallocate `partial_`.
    std::string joined = std::move(partial_[index]);
    partial_[index].clear();
    const uint8_t* data = frame.payload;
    size_t length = frame.length;
    if (!joined.empty()) {
      joined.append(reinterpret_cast<const char*>(frame.payload), frame.length);
      data = reinterpret_cast<const uint8_t*>(joined.data());
      length = joined.size();
    }
    size_t used = 0;
    while (is_live_[index] && length - used >= h2::kMessageHeader) {
      const size_t size = h2::read_u32(data + used + 1);
      if (length - used < h2::kMessageHeader + size) break;
      const uint8_t* from = data + used + h2::kMessageHeader;
      used += h2::kMessageHeader + size;
      take_message(stream_of_[index], {from, from + size});
    }
    if (is_live_[index])
      partial_[index].assign(reinterpret_cast<const char*>(data + used), length - used);
  }

  void take_message(uint32_t stream, proto::Reader message) {
    if (mode_ == Mode::kGrpc) {
      take_response(stream, message);
      return;
    }
    while (message.more()) {  // MultiplexResponse.events
      message.varint();
      proto::Reader event = message.message();
      uint32_t key = 0;
      while (event.more()) {
        const uint64_t tag = event.varint();
        if (tag >> 3 == 1) key = uint32_t(event.varint());
        else if (tag >> 3 == 2) take_response(key, event.message());
        else if (tag >> 3 == 3) listener_.on_end(key), event.message();
        else event.skip(tag & 7);
      }
    }
  }

  // Reads a GenerateResponse: only `num_tokens` of its `tokens`, and whether it has `finished`.
  void take_response(uint32_t stream, proto::Reader message) {
    uint32_t num_tokens = 0;
    bool is_final = false;
    while (message.more()) {
      const uint64_t tag = message.varint();
      if (tag == (4 << 3 | 2)) {
        proto::Reader tokens = message.message();
        while (tokens.more()) {
          const uint64_t inner = tokens.varint();
          if (inner == 4 << 3) num_tokens = uint32_t(tokens.varint());
          else tokens.skip(inner & 7);
        }
      } else {
        is_final |= tag == (5 << 3 | 2);
        message.skip(tag & 7);
      }
    }
    listener_.on_message(stream, num_tokens, is_final);
  }

  void end(uint32_t stream_id) {
    const size_t index = stream_id / 2;
    if (!is_live_[index]) return;
    is_live_[index] = false;
    partial_[index] = {};
    if (mode_ == Mode::kGrpc) {
      listener_.on_end(stream_of_[index]);
      return;
    }
    for (uint32_t i = 0; i < num_; ++i) listener_.on_end(first_ + i);
  }

  // No event is split across chunks, so chunk framing occurs only between events.
  size_t take_events() {
    static const std::string kCount = "\"num_tokens\":";
    size_t used = 0;
    while (const void* found = memmem(input_.data() + used, input_.size() - used, "\n\n", 2)) {
      const size_t stop = size_t(static_cast<const uint8_t*>(found) - input_.data());
      const void* count = memmem(input_.data() + used, stop - used, kCount.data(), kCount.size());
      if (count != nullptr) {
        const char* digits = static_cast<const char*>(count) + kCount.size();
        listener_.on_message(first_, uint32_t(strtoul(digits, nullptr, 10)), false);
      }
      used = stop + 2;
    }
    return used;
  }

  size_t take_lines() {
    size_t used = 0;
    while (const void* found = memchr(input_.data() + used, '\n', input_.size() - used)) {
      const char* digits = reinterpret_cast<const char*>(input_.data() + used);
      listener_.on_message(first_, uint32_t(strtoul(digits, nullptr, 10)), false);
      used = size_t(static_cast<const uint8_t*>(found) - input_.data()) + 1;
    }
    return used;
  }

  const Mode mode_;
  const uint32_t first_, num_;
  const std::string request_;
  Listener& listener_;
  int fd_ = -1;
  bool is_open_ = true;
  uint64_t num_bytes_ = 0;
  uint32_t unacknowledged_ = 0;
  std::string output_;
  std::vector<uint8_t> input_;
  // By half of a call's id: its stream, its incomplete message, and whether it is still open.
  std::vector<uint32_t> stream_of_;
  std::vector<std::string> partial_;
  std::vector<bool> is_live_;
  std::vector<uint32_t> ids_;  // of each stream's latest call
};
