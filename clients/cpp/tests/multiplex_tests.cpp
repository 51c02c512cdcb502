// How requests on one Multiplex call affect each other, with a service of the test on a real
// socket.
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <string>

#include "penstock/client.h"
#include "penstock/requests.h"
#include "penstock/v1/generation_service.grpc.pb.h"

namespace {

using namespace penstock;
using namespace std::chrono_literals;

// For a request without a response: the test fails instead of hanging.
const CallOptions kCall{.timeout = 20s};
int num_failed = 0;

#define CHECK(what)                                                                  \
  do {                                                                               \
    if (!(what)) {                                                                   \
      ++num_failed;                                                                  \
      std::cerr << __FILE__ << ":" << __LINE__ << ": does not hold: " #what << "\n"; \
    }                                                                                \
  } while (false)

// Accepts requests; the second request of a call ends both.
class PairService final : public v1::GenerationService::Service {
 public:
  std::atomic<int> num_calls = 0;
  std::atomic<int> num_submitted = 0;

  grpc::Status Generate(grpc::ServerContext*, const v1::GenerateRequest*,
                        grpc::ServerWriter<v1::GenerateResponse>*) override {
    ++num_submitted;
    return grpc::Status::OK;
  }

  grpc::Status GenerateOnce(grpc::ServerContext*, const v1::GenerateOnceRequest*,
                            v1::GenerateOnceResponse*) override {
    ++num_submitted;
    return grpc::Status::OK;
  }

  grpc::Status Multiplex(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::MultiplexResponse, v1::MultiplexRequest>* stream) override {
    ++num_calls;
    v1::MultiplexRequest command;
    std::uint64_t first = 0;
    while (stream->Read(&command)) {
      if (!command.has_submit()) continue;
      ++num_submitted;
      const std::uint64_t key = command.submit().key();
      v1::MultiplexResponse response;
      add(response, key)->mutable_accepted()->set_request_id("r" + std::to_string(key));
      if (first == 0) {
        first = key;
      } else {
        for (const std::uint64_t each : {first, key}) {
          auto* last = add(response, each);
          last->set_sequence(1);
          last->mutable_finished();
        }
      }
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

 private:
  static v1::GenerateResponse* add(v1::MultiplexResponse& response, std::uint64_t key) {
    auto* event = response.add_events();
    event->set_key(key);
    return event->mutable_response();
  }
};

struct Served {
  PairService service{};
  int port = 0;
  std::unique_ptr<grpc::Server> server{};

  Served() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    server = builder.BuildAndStart();
  }

  [[nodiscard]] std::string address() const { return "127.0.0.1:" + std::to_string(port); }
};

bool is_rejected(const Error& error, const std::string& field) {
  return error.code() == grpc::StatusCode::INVALID_ARGUMENT &&
         std::string(error.what()).find(field) != std::string::npos;
}

template <typename Act>
bool rejects(const std::string& field, Act act) {
  try {
    act();
  } catch (const Error& error) {
    return is_rejected(error, field);
  }
  return false;
}

// Returns whether a stream continues to an end without an error.
bool ends_well(Stream& stream) {
  try {
    while (stream.next().has_value()) {
    }
    return true;
  } catch (const Error& error) {
    std::cerr << error.what() << "\n";
    return false;
  }
}

void what_is_no_utf8_fails_alone() {
  Served served;
  Client client(served.address(), {.retry = kNoRetry, .multiplex = MultiplexOptions{}});
  Stream neighbour = client.generate(text_request("good", 4), kCall);
  CHECK(neighbour.next()->has_accepted());
  Stream bad = client.generate(text_request("x\xff", 4), kCall);
  CHECK(rejects("text_prompt.text", [&] { (void)bad.next(); }));
  CallOptions odd = kCall;
  odd.traceparent = "\xff";
  Stream traced = client.generate(text_request("good", 4), odd);
  CHECK(rejects("traceparent", [&] { (void)traced.next(); }));
  Stream next = client.generate(text_request("good", 4), kCall);
  CHECK(ends_well(next));
  CHECK(ends_well(neighbour));
  CHECK(served.service.num_calls == 1);
  CHECK(served.service.num_submitted == 2);
}

void without_multiplex_it_is_not_sent_either() {
  Served served;
  Client client(served.address());
  const auto request = text_request("x\xff", 4);
  Stream stream = client.generate(request, kCall);
  CHECK(rejects("text_prompt.text", [&] { (void)stream.next(); }));
  CHECK(rejects("text_prompt.text", [&] { client.generate_once(request, kCall); }));
  CHECK(served.service.num_submitted == 0);
}

}  // namespace

int main() {
  what_is_no_utf8_fails_alone();
  without_multiplex_it_is_not_sent_either();
  std::cout << (num_failed == 0 ? "all hold" : "some do not hold") << std::endl;
  return num_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
