// Clocks, processor time of processes, and delays of tokens against a schedule.
#pragma once

#include <dirent.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

// CPU seconds of one thread, from the kernel's scheduler.
inline double thread_cpu_s(int pid, const std::string& thread) {
  const std::string path = "/proc/" + std::to_string(pid) + "/task/" + thread + "/schedstat";
  FILE* file = fopen(path.c_str(), "r");
  if (file == nullptr) return 0;
  unsigned long long run_ns = 0;
  const int num = fscanf(file, "%llu", &run_ns);
  fclose(file);
  return num == 1 ? run_ns * 1e-9 : 0;
}

inline double main_thread_cpu_s(int pid) { return thread_cpu_s(pid, std::to_string(pid)); }

// CPU seconds of all threads of a process.
inline double cpu_s(int pid) {
  double total_s = 0;
  DIR* tasks = opendir(("/proc/" + std::to_string(pid) + "/task").c_str());
  if (tasks == nullptr) return 0;
  while (const dirent* task = readdir(tasks))
    if (task->d_name[0] != '.') total_s += thread_cpu_s(pid, task->d_name);
  closedir(tasks);
  return total_s;
}

// CPU seconds of the whole machine.
inline double machine_busy_s() {
  unsigned long long user, nice, system, idle, wait, irq, soft, steal;
  FILE* file = fopen("/proc/stat", "r");
  if (file == nullptr) return 0;
  const int num = fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &user, &nice, &system,
                         &idle, &wait, &irq, &soft, &steal);
  fclose(file);
  return num == 8 ? (user + nice + system + irq + soft) * 0.01 : 0;
}

// One message of a stream: its tokens are `index` to `index + num_tokens - 1`.
struct Arrival {
  int64_t at_ns;
  uint32_t index;
  uint32_t num_tokens;
};

// Delays in ms of each token of arrivals `first` to `last - 1`. The schedule: token i is due
// at origin + i * step.
//
// `slip_ns`: how far the source is behind its schedule at the end. A source that slips never catches
// up, so its slip at token i is at most the smallest delay of the tokens from i on, and at most
// `slip_ns`. `less_slip` subtracts the smaller of both.
struct Delays {
  std::vector<double> strict_ms;
  std::vector<double> less_slip_ms;
};

inline Delays delays(const std::vector<Arrival>& arrivals, size_t first, size_t last,
                     int64_t origin_ns, double step_ns, int64_t slip_ns) {
  uint32_t num = 0;
  for (const Arrival& a : arrivals) num = std::max(num, a.index + a.num_tokens);
  std::vector<double> least(num + 1, 1e18);
  const auto late_ns = [&](const Arrival& a, uint32_t i) {
    return double(a.at_ns - origin_ns) - double(a.index + i) * step_ns;
  };
  for (const Arrival& a : arrivals)
    for (uint32_t i = 0; i < a.num_tokens; ++i)
      least[a.index + i] = std::min(least[a.index + i], late_ns(a, i));
  for (uint32_t i = num; i-- > 0;) least[i] = std::min(least[i], least[i + 1]);
  Delays found;
  for (size_t at = first; at < last; ++at)
    for (uint32_t i = 0; i < arrivals[at].num_tokens; ++i) {
      const double late = late_ns(arrivals[at], i);
      const double slip = std::max(0.0, std::min(double(slip_ns), least[arrivals[at].index + i]));
      found.strict_ms.push_back(late * 1e-6);
      found.less_slip_ms.push_back((late - slip) * 1e-6);
    }
  std::sort(found.strict_ms.begin(), found.strict_ms.end());
  std::sort(found.less_slip_ms.begin(), found.less_slip_ms.end());
  return found;
}

inline double percentile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return -1;
  return sorted[std::min(sorted.size() - 1, size_t(share * double(sorted.size())))];
}
