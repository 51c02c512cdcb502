// Complete requests in a time window, as an open or closed loop. Part of load_client.cpp.

// Open loop: requests arrive at random, on average `--rate` per second; the times depend on `--seed`
// only. Closed loop: `--concurrency` requests at a time. Counts requests that end between `--warm`
// and `--warm` + `--window` seconds, and the CPU time of each of `--pids` in this window; `loop_s` is
// the CPU time of the first process's main thread.
class Arrive : public Load {
 public:
  explicit Arrive(const Options& options)
      : Load(options),
        pids_(options.numbers("pids")),
        rate_(options.number("rate", 0)),
        num_at_once_(uint32_t(options.number("concurrency", 0))),
        state_(uint64_t(options.number("seed", 1)) * 0x9e3779b97f4a7c15ULL + 1) {}

  int run() {
    const int64_t start_ns = now_ns();
    const int64_t warm_ns = int64_t(options_.number("warm", 0.5) * 1e9);
    const int64_t window_ns = int64_t(options_.number("window", 2) * 1e9);
    due_ns_ = start_ns;
    for (uint32_t i = 0; i < num_at_once_; ++i) send(now_ns());
    serve_until(start_ns + warm_ns);
    const Look before = look();
    window_start_ns_ = before.at_ns;
    serve_until(before.at_ns + window_ns);
    const Look after = look();
    is_sending_ = false;
    const int64_t most_ns = now_ns() + int64_t(options_.number("drain", 10) * 1e9);
    while (num_open_ > 0 && now_ < most_ns && !is_any_closed()) poll(10);
    report(before, after);
    return is_any_closed() ? 4 : 0;
  }

  void on_message(uint32_t stream, uint32_t num_tokens, bool is_final) override {
    Request& request = requests_[stream];
    if (num_tokens > 0 && request.first_ns == 0) request.first_ns = now_;
    request.is_finished |= is_final;
  }

  void on_end(uint32_t stream) override {
    const Request& request = requests_[stream];
    num_open_ -= 1;
    num_ended_ += 1;
    num_finished_ += request.is_finished;
    if (window_start_ns_ > 0 && request.due_ns >= window_start_ns_ && request.is_finished) {
      whole_ms_.push_back(double(now_ - request.due_ns) * 1e-6);
      first_ms_.push_back(double(request.first_ns - request.due_ns) * 1e-6);
    }
    if (num_at_once_ > 0 && is_sending_) send(now_);
  }

 private:
  struct Request {
    int64_t due_ns, first_ns;
    bool is_finished;
  };
  struct Look {
    int64_t at_ns;
    std::vector<double> cpu_s;
    double loop_s, own_s, machine_s;
    uint32_t num_sent, num_finished;
  };

  void serve_until(int64_t end_ns) {
    while (now_ < end_ns && !is_any_closed()) {
      while (rate_ > 0 && due_ns_ <= now_) {
        send(due_ns_);
        due_ns_ += int64_t(-std::log(uniform()) / rate_ * 1e9);
      }
      poll(1);
    }
  }

  void send(int64_t due_ns) {
    const uint32_t number = uint32_t(requests_.size());
    requests_.push_back({due_ns, 0, false});
    num_open_ += 1;
    connections_[number % connections_.size()]->open(number);
  }

  double uniform() {  // in (0, 1]; xorshift64*
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return (double((state_ * 0x2545f4914f6cdd1dULL) >> 11) + 1) * 0x1p-53;
  }

  Look look() const {
    Look seen{now_ns(), {}, 0, cpu_s(getpid()), machine_busy_s(), uint32_t(requests_.size()),
              num_finished_};
    for (int pid : pids_) seen.cpu_s.push_back(cpu_s(pid));
    if (!pids_.empty()) seen.loop_s = main_thread_cpu_s(pids_[0]);
    return seen;
  }

  void report(const Look& before, const Look& after) {
    std::sort(whole_ms_.begin(), whole_ms_.end());
    std::sort(first_ms_.begin(), first_ms_.end());
    printf("{\"start_ns\":%lld,\"end_ns\":%lld,\"cpu_s\":[", (long long)before.at_ns,
           (long long)after.at_ns);
    for (size_t i = 0; i < pids_.size(); ++i)
      printf("%s%.6f", i ? "," : "", after.cpu_s[i] - before.cpu_s[i]);
    printf("],\"loop_s\":%.6f,\"client_s\":%.6f,\"machine_s\":%.4f,", after.loop_s - before.loop_s,
           after.own_s - before.own_s, after.machine_s - before.machine_s);
    printf("\"num_sent\":%u,\"num_finished\":%u,\"num_all_sent\":%zu,\"num_all_ended\":%u,"
           "\"num_all_finished\":%u,",
           after.num_sent - before.num_sent, after.num_finished - before.num_finished,
           requests_.size(), num_ended_, num_finished_);
    printf("\"first_p50_ms\":%.4f,\"first_p99_ms\":%.4f,\"whole_p50_ms\":%.4f,"
           "\"whole_p99_ms\":%.4f}\n",
           percentile(first_ms_, 0.5), percentile(first_ms_, 0.99), percentile(whole_ms_, 0.5),
           percentile(whole_ms_, 0.99));
  }

  const std::vector<int> pids_;
  const double rate_;
  const uint32_t num_at_once_;
  uint64_t state_;
  bool is_sending_ = true;
  int64_t due_ns_ = 0, window_start_ns_ = 0;
  uint32_t num_open_ = 0, num_ended_ = 0, num_finished_ = 0;
  std::vector<Request> requests_;
  std::vector<double> first_ms_, whole_ms_;
};
