// A load client that costs a fraction of the server it measures: one thread, epoll, no gRPC core.
//
//   load_client deliver ...   counts and stamps tokens within a window, prints one line of JSON
//   load_client hold ...      opens streams, reports it, keeps them open until its stdin ends
//   load_client churn ...     consecutive short requests on every stream, some cancelled early
//   load_client arrive ...    requests at a rate or a concurrency, within a time window
//
// All options are `--name value`; delivery.py, stream_memory.py and tracing_cost.py use them.
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>

#include <cmath>
#include <cstdio>
#include <map>

#include "connection.hpp"
#include "measure.hpp"

namespace {

struct Options {
  std::string role;
  std::map<std::string, std::string> values;

  Options(int count, char** arguments) : role(count > 1 ? arguments[1] : "") {
    for (int i = 2; i + 1 < count; i += 2) values[arguments[i] + 2] = arguments[i + 1];
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const auto found = values.find(name);
    return found == values.end() ? otherwise : found->second;
  }
  double number(const std::string& name, double otherwise) const {
    const auto found = values.find(name);
    return found == values.end() ? otherwise : strtod(found->second.c_str(), nullptr);
  }
  std::vector<int> numbers(const std::string& name) const {
    std::vector<int> found;
    const std::string list = text(name, "");
    for (const char* at = list.c_str(); *at;) {
      char* end;
      found.push_back(int(strtol(at, &end, 10)));
      at = *end ? end + 1 : end;
    }
    return found;
  }
  std::string bytes(const std::string& name) const {
    std::string found;
    const std::string hex = text(name, "");
    for (size_t i = 0; i + 1 < hex.size(); i += 2)
      found.push_back(char(strtol(hex.substr(i, 2).c_str(), nullptr, 16)));
    return found;
  }
  Mode mode() const {
    static const std::map<std::string, Mode> kModes = {{"grpc", Mode::kGrpc},
                                                       {"multiplex", Mode::kMultiplex},
                                                       {"events", Mode::kEvents},
                                                       {"lines", Mode::kLines}};
    return kModes.at(text("mode", "grpc"));
  }
};

// The connections of a run and the loop over them.
class Load : public Listener {
 public:
  explicit Load(const Options& options)
      : options_(options), num_streams_(uint32_t(options.number("streams", 1))) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    const Mode mode = options.mode();
    const bool is_http1 = mode == Mode::kEvents || mode == Mode::kLines;
    const uint32_t num = is_http1 ? num_streams_ : uint32_t(options.number("connections", 1));
    const std::string request = options.bytes("request");
    uint32_t first = 0;
    for (uint32_t i = 0; i < num; ++i) {
      const uint32_t count = num_streams_ / num + (i < num_streams_ % num);
      connections_.push_back(std::make_unique<Connection>(
          mode, int(options.number("port", 0)), first, count, request, *this));
      first += count;
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.ptr = connections_.back().get();
      epoll_ctl(epoll_, EPOLL_CTL_ADD, connections_.back()->fd(), &event);
    }
    for (uint32_t i = 0; i < connections_.size(); ++i) {
      connections_[i]->open_all();
      // A listening socket has a queue of bounded length.
      if (is_http1 && i % 64 == 63) poll(20);
    }
  }

  // Wait up to `timeout_ms` and handle the events.
  void poll(int timeout_ms) {
    epoll_event events[256];
    const int num = epoll_wait(epoll_, events, 256, timeout_ms);
    now_ = now_ns();
    for (int i = 0; i < num; ++i) {
      auto* connection = static_cast<Connection*>(events[i].data.ptr);
      now_ = now_ns();
      connection->receive();
      if (!connection->is_open()) epoll_ctl(epoll_, EPOLL_CTL_DEL, connection->fd(), nullptr);
    }
    for (auto& connection : connections_)
      if (connection->has_output()) connection->flush();
  }

  bool is_any_closed() const {
    for (const auto& connection : connections_)
      if (!connection->is_open()) return true;
    return false;
  }

 protected:
  Connection& connection_of(uint32_t stream) {
    const uint32_t num = uint32_t(connections_.size());
    const uint32_t small = num_streams_ / num, num_large = num_streams_ % num;
    const uint32_t in_large = num_large * (small + 1);
    return *connections_[stream < in_large ? stream / (small + 1)
                                           : num_large + (stream - in_large) / small];
  }

  const Options& options_;
  const uint32_t num_streams_;
  int64_t now_ = now_ns();
  std::vector<std::unique_ptr<Connection>> connections_;

 private:
  int epoll_;
};

#include "roles.hpp"
#include "arrivals.hpp"

}  // namespace

int main(int count, char** arguments) {
  signal(SIGPIPE, SIG_IGN);
  const Options options(count, arguments);
  if (options.role == "deliver") return Deliver(options).run();
  if (options.role == "hold") return Hold(options).run();
  if (options.role == "churn") return Churn(options).run();
  if (options.role == "arrive") return Arrive(options).run();
  fprintf(stderr, "load_client deliver|hold|churn|arrive --name value ...\n");
  return 2;
}
