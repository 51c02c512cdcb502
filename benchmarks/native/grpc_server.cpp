// The lower bound of the gRPC core: GenerationService/Generate in C++ with the callback API and one token
// per message, fed by the producer of delivery_peers.py.
//
//   grpc_server PORT SOCKET
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "penstock/v1/generation_service.grpc.pb.h"

namespace {

using penstock::v1::GenerateRequest;
using penstock::v1::GenerateResponse;

constexpr uint32_t kVocabularySize = 32'000;

std::string piece(uint32_t token) { return " w" + std::to_string(token % 1000); }

// One call: tokens wait in a queue while a write is under way.
class Stream : public grpc::ServerWriteReactor<GenerateResponse> {
 public:
  void push(uint32_t token) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (is_over_) return;
    waiting_.push_back(token);
    if (waiting_.size() == 1) write();
  }
  void OnWriteDone(bool ok) override {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (is_over_) return;
    if (!ok) {
      is_over_ = true;
      Finish(grpc::Status::CANCELLED);
      return;
    }
    waiting_.pop_front();
    if (!waiting_.empty()) write();
  }
  void OnCancel() override {}
  // Never deleted: the source may still reference it, and the process ends with the run.
  void OnDone() override {}

 private:
  void write() {
    message_.set_sequence(num_sent_++);
    auto* tokens = message_.mutable_tokens();
    tokens->set_text(piece(waiting_.front()));
    tokens->set_num_tokens(1);
    StartWrite(&message_);
  }

  std::mutex mutex_;
  std::deque<uint32_t> waiting_;
  GenerateResponse message_;
  uint64_t num_sent_ = 0;
  bool is_over_ = false;
};

class Source {
 public:
  explicit Source(const char* path) {
    socket_ = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      perror(path);
      exit(3);
    }
  }
  void add(Stream* stream) {
    const std::lock_guard<std::mutex> guard(mutex_);
    streams_.push_back(stream);
    if (write(socket_, "+", 1) != 1) perror("write");
  }
  // Passes tokens to the streams until the producer disconnects.
  void run() {
    std::vector<uint32_t> tokens;
    uint32_t header[2];
    while (take(header, sizeof header)) {
      tokens.resize(header[1]);
      if (!take(tokens.data(), tokens.size() * sizeof(uint32_t))) return;
      std::vector<Stream*> streams;
      {
        const std::lock_guard<std::mutex> guard(mutex_);
        streams = streams_;
      }
      for (size_t i = 0; i < tokens.size() && i < streams.size(); ++i)
        streams[i]->push(tokens[i] % kVocabularySize);
    }
  }

 private:
  bool take(void* to, size_t size) {
    return recv(socket_, to, size, MSG_WAITALL) == ssize_t(size);
  }

  int socket_;
  std::mutex mutex_;
  std::vector<Stream*> streams_;
};

class Service : public penstock::v1::GenerationService::CallbackService {
 public:
  explicit Service(Source& source) : source_(source) {}
  grpc::ServerWriteReactor<GenerateResponse>* Generate(grpc::CallbackServerContext*,
                                                       const GenerateRequest*) override {
    auto* stream = new Stream;
    source_.add(stream);
    return stream;
  }

 private:
  Source& source_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  Source source(arguments[2]);
  Service service(source);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(std::string("127.0.0.1:") + arguments[1],
                           grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (server == nullptr) return 3;
  printf("ready\n");
  fflush(stdout);
  source.run();
  _exit(0);  // without destructors: streams are still open
}
