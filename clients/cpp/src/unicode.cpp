#include "unicode.h"

#include <google/protobuf/descriptor.h>

#include <string>
#include <utility>
#include <vector>

#include "penstock/error.h"

namespace penstock {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Returns the number of bytes of the first character; 0 if it is invalid.
std::size_t length_of_first(std::string_view text) noexcept {
  const auto byte = [text](std::size_t index) { return static_cast<unsigned char>(text[index]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  const std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (text.size() < length) return 0;
  for (std::size_t index = 1; index < length; ++index) {
    if ((byte(index) & 0xc0) != 0x80) return 0;
  }
  const unsigned char second = byte(1);
  const bool is_overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool is_surrogate = first == 0xed && second > 0x9f;
  const bool is_too_great = first == 0xf4 && second > 0x8f;
  return is_overlong || is_surrogate || is_too_great ? 0 : length;
}

void find(const Message& message, const std::string& prefix, std::vector<FieldViolation>& found);

// Checks one value of a field; `index` is -1 for a field that is not repeated.
void find_in(const Message& message, const FieldDescriptor* field, int index,
             const std::string& path, std::vector<FieldViolation>& found) {
  const auto* reflection = message.GetReflection();
  const bool is_one = index < 0;
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    const Message& part = is_one ? reflection->GetMessage(message, field)
                                 : reflection->GetRepeatedMessage(message, field, index);
    find(part, path + ".", found);
    return;
  }
  std::string scratch;
  const std::string& text =
      is_one ? reflection->GetStringReference(message, field, &scratch)
             : reflection->GetRepeatedStringReference(message, field, index, &scratch);
  // The text is not quoted, because prompts may be private.
  if (!is_utf8(text)) found.push_back({.field = path, .description = "is not valid UTF-8"});
}

void find(const Message& message, const std::string& prefix, std::vector<FieldViolation>& found) {
  const auto* reflection = message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const auto* field : fields) {
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (!is_message && field->type() != FieldDescriptor::TYPE_STRING) continue;
    const std::string path = prefix + field->name();
    if (!field->is_repeated()) {
      find_in(message, field, -1, path, found);
      continue;
    }
    const int size = reflection->FieldSize(message, field);
    for (int index = 0; index < size; ++index) {
      find_in(message, field, index, path + "[" + std::to_string(index) + "]", found);
    }
  }
}

}  // namespace

bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const std::size_t length = length_of_first(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

void require_utf8(const Message& request) {
  std::vector<FieldViolation> found;
  find(request, {}, found);
  if (found.empty()) return;
  std::string message = found.front().field + ": " + found.front().description;
  throw Error({.code = grpc::StatusCode::INVALID_ARGUMENT,
               .message = std::move(message),
               .field_violations = std::move(found)});
}

}  // namespace penstock
