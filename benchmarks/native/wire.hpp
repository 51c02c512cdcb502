// The parts of Protobuf and HTTP/2 that a client of token streams needs.
//
// Responses are read without validation. Header blocks are skipped, so the status of a stream is
// unknown, only its end.
#pragma once

#include <cstdint>
#include <string>

namespace proto {

struct Reader {
  const uint8_t* at;
  const uint8_t* end;

  bool more() const { return at < end; }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; at < end && shift < 64; shift += 7) {
      const uint8_t byte = *at++;
      value |= uint64_t(byte & 127) << shift;
      if (!(byte & 128)) break;
    }
    return value;
  }
  Reader message() {
    const uint64_t length = varint();
    const uint8_t* from = at;
    at = length > uint64_t(end - at) ? end : at + length;
    return {from, at};
  }
  void skip(unsigned wire_type) {
    switch (wire_type) {
      case 0: varint(); break;
      case 1: at = end - at < 8 ? end : at + 8; break;
      case 2: message(); break;
      default: at = end - at < 4 ? end : at + 4;
    }
  }
};

inline void put_varint(std::string& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out.push_back(char((value & 127) | 128));
  out.push_back(char(value));
}

inline void put_bytes(std::string& out, unsigned field, const std::string& bytes) {
  put_varint(out, field << 3 | 2);
  put_varint(out, bytes.size());
  out += bytes;
}

}  // namespace proto

namespace h2 {

enum Type : uint8_t { kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6, kGoAway = 7, kWindow = 8 };
constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;
constexpr uint32_t kMostWindow = 0x7fffffff;
constexpr uint32_t kCancel = 8;
constexpr size_t kFrameHeader = 9;
constexpr size_t kMessageHeader = 5;  // of gRPC, inside DATA

struct Frame {
  uint32_t length;
  uint8_t type, flags;
  uint32_t stream_id;
  const uint8_t* payload;
};

inline uint32_t read_u32(const uint8_t* p) {
  return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3];
}

inline Frame read_frame(const uint8_t* p) {
  return {uint32_t(p[0]) << 16 | uint32_t(p[1]) << 8 | p[2], p[3], p[4],
          read_u32(p + 5) & kMostWindow, p + kFrameHeader};
}

inline std::string u32(uint32_t value) {
  return {char(value >> 24), char(value >> 16), char(value >> 8), char(value)};
}

inline void put_frame(std::string& out, Type type, uint8_t flags, uint32_t stream_id,
                      const std::string& payload) {
  const uint32_t length = uint32_t(payload.size());
  out += {char(length >> 16), char(length >> 8), char(length), char(type), char(flags)};
  out += u32(stream_id);
  out += payload;
}

// A literal header that is not indexed, so neither side needs a dynamic table.
inline void put_header(std::string& block, const std::string& name, const std::string& value) {
  block.push_back(0);
  block.push_back(char(name.size()));
  block += name;
  block.push_back(char(value.size()));
  block += value;
}

inline void put_preface(std::string& out) {
  out += "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  const auto setting = [](char id, uint32_t value) { return std::string{'\0', id} + u32(value); };
  put_frame(out, kSettings, 0, 0,
            setting(2, 0) + setting(4, kMostWindow) + setting(5, 1 << 20));
  put_frame(out, kWindow, 0, 0, u32(kMostWindow - 65535));
}

inline void put_grpc_call(std::string& out, uint32_t stream_id, const std::string& path) {
  std::string block;
  put_header(block, ":method", "POST");
  put_header(block, ":scheme", "http");
  put_header(block, ":path", path);
  put_header(block, ":authority", "localhost");
  put_header(block, "te", "trailers");
  put_header(block, "content-type", "application/grpc");
  put_frame(out, kHeaders, kEndHeaders, stream_id, block);
}

inline void put_grpc_message(std::string& out, uint32_t stream_id, const std::string& message,
                             bool is_last) {
  put_frame(out, kData, is_last ? kEndStream : 0, stream_id,
            std::string(1, '\0') + u32(uint32_t(message.size())) + message);
}

}  // namespace h2
