// How a client proves who it is, and knows whom it talks to.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "penstock/options.h"

namespace penstock {

// What gRPC is to connect to: port 50051 for a host alone; gRPC's own targets pass as they are.
// Throws std::invalid_argument.
std::string grpc_target(const std::string& address);

// What connections are made with. Throws std::invalid_argument for a file that cannot be read.
std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const std::optional<TlsOptions>& tls);

// Throws std::invalid_argument for a token that any client on the way could read.
void check_token_is_safe(const ClientOptions& options, const std::string& target);

// The metadata value that carries a token. Throws std::invalid_argument for one that is none.
std::string authorization(const std::string& token);

}  // namespace penstock
