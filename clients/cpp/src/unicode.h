// Whether a request's strings can be sent. protobuf sends them as they are, and the server then
// reads nothing of the message, of whichever request it is about.
#pragma once

#include <google/protobuf/message.h>

#include <string_view>

namespace penstock {

// As of RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

// Throws Error with INVALID_ARGUMENT and the path of each string field that is not UTF-8.
void require_utf8(const google::protobuf::Message& request);

}  // namespace penstock
