// Streams the response to one prompt: `generate ADDRESS PROMPT`.
#include <iostream>

#include "penstock/client.h"
#include "penstock/requests.h"

int main(int num_arguments, char** arguments) {
  if (num_arguments != 3) {
    std::cerr << "usage: generate ADDRESS PROMPT\n";
    return 2;
  }
  try {
    penstock::Client client(arguments[1]);
    auto request = penstock::text_request(arguments[2], /*max_tokens=*/64);
    request.mutable_resume_timeout()->set_seconds(30);  // reconnects after a lost connection
    for (const auto& event : client.generate(request, {.timeout = std::chrono::seconds(30)})) {
      if (event.has_tokens()) std::cout << event.tokens().text() << std::flush;
    }
    std::cout << std::endl;
  } catch (const penstock::Error& error) {
    std::cerr << error.what() << "\n";
    for (const auto& violation : error.failure().field_violations) {
      std::cerr << violation.field << ": " << violation.description << "\n";
    }
    return 1;
  }
  return 0;
}
