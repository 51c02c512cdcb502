// Options of a client and of its calls. They are validated when a Client is created.
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

// When a failed call is retried: if its status is UNAVAILABLE, or RESOURCE_EXHAUSTED for a full
// queue, a quota or with a retry delay, and if none of its output was delivered. The wait is the
// server's retry delay plus up to `pushback_jitter` of it. Without a retry delay it is random, from
// half to all of min(initial_backoff * multiplier^(k-1), max_backoff). As in gRFC A6, client-side.
struct RetryPolicy {
  int max_attempts = 4;
  std::chrono::milliseconds initial_backoff{200};
  double multiplier = 2.0;
  std::chrono::milliseconds max_backoff{5000};
  double pushback_jitter = 0.2;
};

inline constexpr RetryPolicy kNoRetry{.max_attempts = 1};

// PEM files, which are read when a client is created. Without `ca` the certificate authorities of
// the system are accepted. `cert` and `key` are for mutual TLS. `server_name` is the name that the
// certificate must have, if it is not the host of the address.
struct TlsOptions {
  std::optional<std::filesystem::path> ca{};
  std::optional<std::filesystem::path> cert{};
  std::optional<std::filesystem::path> key{};
  std::string server_name{};
};

// How all generations of a client share one Multiplex call.
struct MultiplexOptions {
  // Output tokens of one request that the server may send before they are read from its Stream.
  std::uint32_t window_tokens = 256;
  // After this time new requests use a new call, so that no call exceeds the maximum connection
  // age.
  std::chrono::seconds max_call_age{1200};
  // A larger request fails and is not sent, because it would end the call for all requests.
  std::size_t max_request_bytes = std::size_t{4} << 20;
};

struct ClientOptions {
  // Called for the bearer token before each call, because tokens expire. The token is never sent in
  // plain text to another machine.
  std::function<std::string()> token{};
  // Unset: plain text.
  std::optional<TlsOptions> tls{};
  RetryPolicy retry{};
  // Unset: each generation is a separate call.
  std::optional<MultiplexOptions> multiplex{};
  // Sent with all calls.
  Metadata metadata{};
  int max_message_bytes = 32 << 20;
};

struct CallOptions {
  // For all attempts together; sent as the gRPC deadline. Unset: the default of the server.
  std::optional<std::chrono::nanoseconds> timeout{};
  // The W3C trace context to which this call belongs; "" for none.
  std::string traceparent{};
  std::string tracestate{};
  // Not allowed with `multiplex`, whose call is shared.
  Metadata metadata{};
  // Cancels the call from any thread.
  std::stop_token stop{};
  // Only with `multiplex`: the initial credit of the request; Stream::give_credit adds more. Unset:
  // reading grants credit.
  std::optional<std::uint32_t> num_credit_tokens{};
};

}  // namespace penstock
