// The conformance program: reads names of scenarios from stdin and writes a line of JSON for each
// to stdout.
#include <condition_variable>
#include <cstdio>
#include <iostream>
#include <mutex>
#include <thread>

#include "line_reader.h"
#include "scenario.h"

namespace conformance {
namespace {

constexpr auto kScenarioTimeout = 60s;

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') {
      json += std::string("\\") + letter;
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      char escape[8] = {};
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(letter));
      json += escape;
    } else {
      json += letter;
    }
  }
  return json + "\"";
}

// `fields` has names and values alternately.
void write_line(std::initializer_list<std::string> fields) {
  std::string line = "{";
  bool is_name = true;
  for (const auto& field : fields) {
    if (is_name && line.size() > 1) line += ", ";
    line += quoted(field) + (is_name ? ": " : "");
    is_name = !is_name;
  }
  std::cout << line << "}" << std::endl;
}

// Stops a scenario that takes too long. Its open calls then end with CANCELLED.
class Guard {
 public:
  explicit Guard(std::stop_source& stop)
      : thread_([this, &stop](const std::stop_token& done) {
          std::unique_lock lock(mutex_);
          wake_.wait_for(lock, done, kScenarioTimeout, [] { return false; });
          if (!done.stop_requested()) stop.request_stop();
        }) {}

 private:
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::jthread thread_;
};

void run(const std::string& name, Check check, const std::string& address, LineReader& lines) {
  std::stop_source stop;
  ScenarioInput scenario{.address = address, .stop = stop.get_token()};
  scenario.ready = [&name] { write_line({"scenario", name, "event", "ready"}); };
  scenario.until_go = [&] {
    scenario.ready();
    require(lines.next(kScenarioTimeout) == "go", "expected go");
  };
  try {
    const Guard guard(stop);
    check(scenario);
    write_line({"scenario", name, "outcome", "passed"});
  } catch (const std::exception& error) {
    const std::string late = stop.stop_requested() ? "not done within 60 s: " : "";
    write_line({"scenario", name, "outcome", "failed", "why", late + error.what()});
  }
}

int serve(std::string address) {
  Checks checks = answers();
  checks.merge(rejections());
  checks.merge(request_ends());
  LineReader lines;
  while (const auto line = lines.next()) {
    const auto space = line->find(' ');
    if (line->substr(0, space) == "address" && space != std::string::npos) {
      address = line->substr(space + 1);
    } else if (const auto found = checks.find(*line); found != checks.end()) {
      run(*line, found->second, address, lines);
    } else if (!line->empty()) {
      write_line({"scenario", *line, "outcome", "failed", "why", "no such scenario"});
    }
  }
  return 0;
}

}  // namespace
}  // namespace conformance

int main(int num_arguments, char** arguments) {
  const bool has_address = num_arguments == 3 && std::string(arguments[1]) == "--address";
  if (!has_address) {
    std::cerr << "usage: conformance --address HOST:PORT\n";
    return 2;
  }
  return conformance::serve(arguments[2]);
}
