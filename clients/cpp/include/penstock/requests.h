// Creates common requests. All other fields are set on the message.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>

#include "penstock/v1/generation_service.pb.h"

namespace penstock {

inline v1::GenerateRequest text_request(std::string prompt, std::uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.mutable_text_prompt()->set_text(std::move(prompt));
  request.mutable_stopping()->set_max_tokens(max_tokens);
  return request;
}

inline v1::GenerateRequest token_request(std::span<const std::uint32_t> ids,
                                         std::uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.mutable_token_prompt()->mutable_ids()->Add(ids.begin(), ids.end());
  request.mutable_stopping()->set_max_tokens(max_tokens);
  return request;
}

// `messages` has the role and the content of each message, the oldest first.
inline v1::GenerateRequest chat_request(
    std::initializer_list<std::pair<const char*, const char*>> messages, std::uint32_t max_tokens) {
  v1::GenerateRequest request;
  for (const auto& [role, content] : messages) {
    auto* message = request.mutable_chat_prompt()->add_messages();
    message->set_role(role);
    message->add_parts()->set_text(content);
  }
  request.mutable_stopping()->set_max_tokens(max_tokens);
  return request;
}

}  // namespace penstock
