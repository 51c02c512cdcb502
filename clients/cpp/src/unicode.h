// Checks that the strings of a request are UTF-8. Protobuf would send other bytes unchanged, and
// the server could then parse nothing of the message, including its other requests.
#pragma once

#include <google/protobuf/message.h>

#include <string_view>

namespace penstock {

// As in RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

// Throws Error with INVALID_ARGUMENT and the path of each string field that is not UTF-8.
void require_utf8(const google::protobuf::Message& request);

}  // namespace penstock
