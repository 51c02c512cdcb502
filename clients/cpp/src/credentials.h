// Authentication of client and server.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "penstock/options.h"

namespace penstock {

// Returns the gRPC target of an address, with the default port 50051. gRPC targets are returned
// unchanged. Throws std::invalid_argument.
std::string grpc_target(const std::string& address);

// Returns the credentials of connections. Throws std::invalid_argument for a file that cannot be
// read.
std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const std::optional<TlsOptions>& tls);

// Throws std::invalid_argument for a token that would be sent in plain text.
void check_token_is_safe(const ClientOptions& options, const std::string& target);

// Returns the metadata value with a token. Throws std::invalid_argument for an invalid token.
std::string authorization(const std::string& token);

}  // namespace penstock
