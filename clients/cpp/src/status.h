// Reads a failed call or request: status, google.rpc details and push-back become a Failure.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <string>

#include "penstock/error.h"
#include "penstock/v1/error.pb.h"

namespace penstock {

// The failure of a call that has ended. `request_id`: as known so far. Details that cannot be read
// are left out rather than hiding the status itself.
Failure failure_of_call(const grpc::Status& status, const grpc::ClientContext& context,
                        const std::string& request_id = {});

// The failure of one request on a Multiplex call. A code that gRPC does not have becomes UNKNOWN.
Failure failure_of_status(const google::rpc::Status& status, const std::string& request_id);

// A call that a client else cancelled before the server stated anything counts as not served: a
// server that shuts down does that to calls which reach it in the same moment.
Failure unless_asked(Failure failure);

// Reads grpc-retry-pushback-ms as gRFC A6 has it: negative or unreadable means do not come again.
void read_pushback(const std::string& value, Failure& failure);

// Failures the client finds by itself.
Failure cancelled(std::string request_id);
Failure deadline_passed(std::string request_id);

}  // namespace penstock
