// How a client and its calls behave. Plain values; they are checked where a Client is made.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

namespace penstock {

using Metadata = std::vector<std::pair<std::string, std::string>>;

// When a failed call is tried again: UNAVAILABLE, or RESOURCE_EXHAUSTED for a full queue, a quota
// or with a time to wait; and only while no output of it was delivered. The wait is what the server
// states and up to `pushback_jitter` of it more; else it is drawn from half to the whole of
// min(initial_backoff * multiplier^(k-1), max_backoff). After gRFC A6, client-side.
struct RetryPolicy {
  int max_attempts = 4;
  std::chrono::milliseconds initial_backoff{200};
  double multiplier = 2.0;
  std::chrono::milliseconds max_backoff{5000};
  double pushback_jitter = 0.2;
};

inline constexpr RetryPolicy kNoRetry{.max_attempts = 1};

// PEM files, read when a client is made. Without `ca` the system's authorities are accepted; `cert`
// and `key` are for mutual TLS. `server_name`: whom the certificate is for, if not the address.
struct TlsOptions {
  std::optional<std::filesystem::path> ca{};
  std::optional<std::filesystem::path> cert{};
  std::optional<std::filesystem::path> key{};
  std::string server_name{};
};

// All generations of a client over one Multiplex call.
struct MultiplexOptions {
  // Output tokens the server may send of one request beyond what was read from its Stream.
  std::uint32_t window_tokens = 256;
  // New requests go to a new call after this long, so that no call outlives its connection.
  std::chrono::seconds max_call_age{1200};
  // A larger request fails by itself; sent, it would end the call for all others.
  std::size_t max_request_bytes = std::size_t{4} << 20;
};

struct ClientOptions {
  // Asked for the bearer token before each call, because tokens expire. Never sent in plain text to
  // another machine.
  std::function<std::string()> token{};
  // Unset: plain text.
  std::optional<TlsOptions> tls{};
  RetryPolicy retry{};
  // Unset: each generation is a separate call.
  std::optional<MultiplexOptions> multiplex{};
  // Sent with every call.
  Metadata metadata{};
  int max_message_bytes = 32 << 20;
};

struct CallOptions {
  // For all attempts together; travels as the gRPC deadline. Unset: the server's default.
  std::optional<std::chrono::nanoseconds> timeout{};
  // W3C trace context this call belongs to; "" for none.
  std::string traceparent{};
  std::string tracestate{};
  // Not together with `multiplex`, whose call is shared.
  Metadata metadata{};
  // Cancels the call from any thread.
  std::stop_token stop{};
  // With `multiplex` only: the credit the request begins with; more is given by hand then, with
  // Stream::give_credit. Unset: credit follows what is read.
  std::optional<std::uint32_t> num_credit_tokens{};
};

}  // namespace penstock
