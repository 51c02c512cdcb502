#include "credentials.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace penstock {
namespace {

constexpr std::array kSchemes = {"dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "xds:"};

bool has_scheme(const std::string& address) {
  return std::ranges::any_of(kSchemes, [&](const char* it) { return address.starts_with(it); });
}

std::string contents_of(const std::optional<std::filesystem::path>& path, const char* option) {
  if (!path.has_value()) return {};
  std::ifstream file(*path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad() || text.empty()) {
    throw std::invalid_argument(std::string("tls.") + option + ": cannot read " + path->string());
  }
  return text;
}

bool is_loopback(std::string_view host) {
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const bool is_ipv4 = std::ranges::all_of(
      host, [](char digit) { return digit == '.' || (digit >= '0' && digit <= '9'); });
  return host == "localhost" || host == "::1" || (is_ipv4 && host.starts_with("127."));
}

bool is_local(std::string_view target) {
  if (target.starts_with("unix:") || target.starts_with("unix-abstract:")) return true;
  for (const std::string_view scheme : {"dns:", "ipv4:", "ipv6:"}) {
    if (target.starts_with(scheme)) target.remove_prefix(scheme.size());
  }
  while (target.starts_with('/')) target.remove_prefix(1);
  while (true) {
    const auto comma = target.find(',');
    const auto one = target.substr(0, comma);
    if (!is_loopback(one.substr(0, one.rfind(':')))) return false;
    if (comma == std::string_view::npos) return true;
    target.remove_prefix(comma + 1);
  }
}

}  // namespace

std::string grpc_target(const std::string& address) {
  if (address.empty()) throw std::invalid_argument("address: is empty");
  if (has_scheme(address)) return address;
  // The colons of an IPv6 address are inside its brackets.
  const auto bracket = address.rfind(']');
  const auto colon = address.find(':', bracket == std::string::npos ? 0 : bracket);
  if (colon == std::string::npos) return address + ":50051";
  const auto port = address.substr(colon + 1);
  const bool is_number = !port.empty() && port.size() <= 5 &&
                         std::ranges::all_of(port, [](char it) { return it >= '0' && it <= '9'; });
  if (!is_number || colon == 0 || std::stoi(port) < 1 || std::stoi(port) > 65535) {
    throw std::invalid_argument("address: must be HOST, HOST:PORT, [IPV6]:PORT or a gRPC target");
  }
  return address;
}

std::shared_ptr<grpc::ChannelCredentials> channel_credentials(
    const std::optional<TlsOptions>& tls) {
  if (!tls.has_value()) return grpc::InsecureChannelCredentials();
  if (tls->cert.has_value() != tls->key.has_value()) {
    throw std::invalid_argument("tls.cert and tls.key: each requires the other");
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = contents_of(tls->ca, "ca");
  options.pem_private_key = contents_of(tls->key, "key");
  options.pem_cert_chain = contents_of(tls->cert, "cert");
  return grpc::SslCredentials(options);
}

void check_token_is_safe(const ClientOptions& options, const std::string& target) {
  if (options.token && !options.tls.has_value() && !is_local(target)) {
    throw std::invalid_argument("token: would cross the network to " + target +
                                " in plain text; set tls");
  }
}

std::string authorization(const std::string& token) {
  const bool is_printable =
      std::ranges::all_of(token, [](char letter) { return letter > ' ' && letter <= '~'; });
  // The token is not quoted, because the error may be logged.
  if (token.empty() || !is_printable) {
    throw std::invalid_argument("token: must be printable ASCII without a space, and not empty");
  }
  return "Bearer " + token;
}

}  // namespace penstock
