// Converts the status, google.rpc details and push-back of a failed call or request to a Failure.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <string>

#include "penstock/error.h"
#include "penstock/v1/error.pb.h"

namespace penstock {

// Returns the failure of a call that has ended. `request_id` is the id as known so far. Details
// that cannot be parsed are ignored, so that they do not hide the status.
Failure failure_of_call(const grpc::Status& status, const grpc::ClientContext& context,
                        const std::string& request_id = {});

// Returns the failure of one request on a Multiplex call. A code that gRPC does not define becomes
// UNKNOWN.
Failure failure_of_status(const google::rpc::Status& status, const std::string& request_id);

// Converts the error of a call that was cancelled before the server responded, and not by this
// client, to UNAVAILABLE. A server that shuts down cancels calls that arrive at the same moment.
Failure cancelled_to_unavailable(Failure failure);

// Reads grpc-retry-pushback-ms as in gRFC A6. A negative or invalid value means that the call must
// not be retried.
void read_pushback(const std::string& value, Failure& failure);

// Failures that the client itself detects.
Failure cancelled(std::string request_id);
Failure deadline_passed(std::string request_id);

}  // namespace penstock
