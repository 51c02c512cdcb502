// The commands of the load client. Part of load_client.cpp.

// Counts tokens in a time window and measures the delay of each against the source's schedule.
//
// With `--schedule FILE` the source writes the due time of token 0 there (CLOCK_MONOTONIC, ns).
// Otherwise the source pauses twice, for `--pause` seconds beyond its step. If no stream gets a
// message for half of that time, it is a mark: the server has nothing left to send, and the next
// token of every stream belongs to the same step. Token i after the first mark is due at
// origin + i * step; the fastest token determines the origin. The first token after the second mark
// gives the slip of the source between both marks.
class Deliver : public Load {
 public:
  explicit Deliver(const Options& options)
      : Load(options),
        num_tokens_(num_streams_),
        num_before_(num_streams_),
        has_ended_(num_streams_),
        has_mark_(options.text("schedule", "").empty()),
        step_ns_(options.number("step", 0.02) * 1e9),
        pause_ns_(options.number("pause", 1) * 1e9),
        servers_(options.numbers("servers")),
        others_(options.numbers("others")) {
    arrivals_.reserve(1 << 20);
  }

  int run() {
    const int64_t most_ns = now_ns() + int64_t(options_.number("limit", 60) * 1e9);
    if (!until(&Deliver::all_started, most_ns)) return failed("streams did not start");
    if (has_mark_) {
      if (!until(&Deliver::is_silent, most_ns)) return failed("the source did not pause");
      num_before_ = num_tokens_;
    }
    is_recording_ = true;
    if (!until(&Deliver::has_new_token, most_ns)) return failed("nothing came");
    wait(options_.number("warm", 0.7));
    const Snapshot before = look();
    window_start_ = arrivals_.size();
    wait(options_.number("window", 2));
    const Snapshot after = look();
    window_end_ = arrivals_.size();
    if (has_mark_) {
      // A server that is behind by more than the pause sends without a pause.
      has_second_mark_ = until(&Deliver::is_silent, now_ns() + 3 * int64_t(pause_ns_));
      is_recording_ = false;
      num_until_pause_ = num_tokens_;
      first_token_ns_ = 0;
      if (has_second_mark_ && !until(&Deliver::has_first_token, most_ns))
        return failed("no second start");
    }
    report(before, after);
    return 0;
  }

  void on_message(uint32_t stream, uint32_t num_tokens, bool) override {
    num_messages_ += 1;
    if (num_tokens == 0) return;
    if (num_tokens_[stream] == 0) num_streams_with_token_ += 1;
    if (is_recording_)
      arrivals_.push_back({now_, uint32_t(num_tokens_[stream] - num_before_[stream]), num_tokens});
    num_tokens_[stream] += num_tokens;
    num_all_tokens_ += num_tokens;
    last_token_ns_ = now_;
    if (first_token_ns_ == 0) first_token_ns_ = now_;
  }

  void on_end(uint32_t stream) override {
    num_ended_ += !has_ended_[stream];
    has_ended_[stream] = true;
  }

 private:
  struct Snapshot {
    int64_t at_ns;
    std::vector<double> servers_s, others_s;
    double own_s, machine_s;
    uint64_t num_messages, num_tokens;
  };

  bool all_started() const { return num_streams_with_token_ == num_streams_; }
  bool is_silent() const { return now_ - last_token_ns_ > 0.5 * pause_ns_; }
  bool has_new_token() const { return !arrivals_.empty(); }
  bool has_first_token() const { return first_token_ns_ != 0; }

  bool until(bool (Deliver::*condition)() const, int64_t most_ns) {
    while (!(this->*condition)()) {
      poll(10);
      if (now_ > most_ns || is_any_closed() || num_ended_ > 0) return false;
    }
    return true;
  }

  void wait(double duration_s) {
    for (const int64_t end = now_ns() + int64_t(duration_s * 1e9); now_ < end;) poll(5);
  }

  Snapshot look() const {
    Snapshot seen{now_ns(), {}, {}, cpu_s(getpid()), machine_busy_s(), num_messages_,
                  num_all_tokens_};
    for (int pid : servers_) seen.servers_s.push_back(cpu_s(pid));
    for (int pid : others_) seen.others_s.push_back(cpu_s(pid));
    return seen;
  }

  int failed(const char* why) const {
    fprintf(stderr, "%s: %u of %u streams have tokens, %u ended\n", why, num_streams_with_token_,
            num_streams_, num_ended_);
    return 4;
  }

  static void print_list(const char* name, const std::vector<double>& before,
                         const std::vector<double>& after) {
    printf("\"%s\":[", name);
    for (size_t i = 0; i < after.size(); ++i)
      printf("%s%.6f", i ? "," : "", after[i] - before[i]);
    printf("],");
  }

  void report(const Snapshot& before, const Snapshot& after) const {
    int64_t origin_ns = INT64_MAX, slip_ns = 0;
    bool is_aligned = true;
    if (has_mark_) {
      for (const Arrival& a : arrivals_)
        origin_ns = std::min(origin_ns, a.at_ns - int64_t(a.index * step_ns_));
    }
    if (has_second_mark_) {
      const uint64_t num = num_until_pause_[0] - num_before_[0];
      for (uint32_t i = 0; i < num_streams_; ++i)
        is_aligned &= num_until_pause_[i] - num_before_[i] == num;
      const int64_t due_ns = origin_ns + int64_t(double(num) * step_ns_ + pause_ns_);
      slip_ns = std::max<int64_t>(0, first_token_ns_ - due_ns);
    }
    if (!has_mark_) {
      long long found = 0;
      FILE* file = fopen(options_.text("schedule", "").c_str(), "r");
      is_aligned = file != nullptr && fscanf(file, "%lld", &found) == 1;
      if (file != nullptr) fclose(file);
      origin_ns = found;
    }
    const Delays all =
        delays(arrivals_, window_start_, window_end_, origin_ns, step_ns_, slip_ns);
    printf("{\"window_s\":%.6f,", double(after.at_ns - before.at_ns) * 1e-9);
    print_list("servers_s", before.servers_s, after.servers_s);
    print_list("others_s", before.others_s, after.others_s);
    printf("\"client_s\":%.6f,\"machine_s\":%.3f,", after.own_s - before.own_s,
           after.machine_s - before.machine_s);
    printf("\"num_messages\":%llu,\"num_tokens\":%llu,\"num_ended\":%u,\"is_aligned\":%s,",
           (unsigned long long)(after.num_messages - before.num_messages),
           (unsigned long long)(after.num_tokens - before.num_tokens), num_ended_,
           is_aligned ? "true" : "false");
    printf("\"slip_ms\":%.3f", has_mark_ && !has_second_mark_ ? -1 : double(slip_ns) * 1e-6);
    print_delays("strict", all.strict_ms);
    print_delays("delay", all.less_slip_ms);
    printf("}\n");
  }

  static void print_delays(const char* name, const std::vector<double>& sorted) {
    printf(",\"%s_p50_ms\":%.4f,\"%s_p99_ms\":%.4f,\"%s_max_ms\":%.4f", name,
           percentile(sorted, 0.5), name, percentile(sorted, 0.99), name, percentile(sorted, 1));
  }

  std::vector<uint64_t> num_tokens_, num_before_, num_until_pause_;
  std::vector<bool> has_ended_;
  const bool has_mark_;
  const double step_ns_, pause_ns_;
  const std::vector<int> servers_, others_;
  std::vector<Arrival> arrivals_;
  size_t window_start_ = 0, window_end_ = 0;
  bool is_recording_ = false, has_second_mark_ = false;
  uint32_t num_streams_with_token_ = 0, num_ended_ = 0;
  uint64_t num_messages_ = 0, num_all_tokens_ = 0;
  int64_t last_token_ns_ = now_ns(), first_token_ns_ = 0;
};

// Opens streams and keeps them open. Prints one line once each has its first message or, with
// `--until token`, its first token.
class Hold : public Load {
 public:
  explicit Hold(const Options& options)
      : Load(options), is_open_(num_streams_), waits_for_token_(options.text("until", "") == "token") {}

  int run() {
    const int64_t most_ns = now_ns() + int64_t(options_.number("limit", 60) * 1e9);
    while (num_open_ < num_streams_ && num_ended_ == 0 && now_ < most_ns) poll(20);
    printf("{\"num_open\":%u,\"num_ended\":%u}\n", num_open_, num_ended_);
    fflush(stdout);
    pollfd input{0, POLLIN, 0};
    while (::poll(&input, 1, 0) == 0 && now_ < most_ns) poll(50);
    return num_open_ == num_streams_ ? 0 : 4;
  }

  void on_message(uint32_t stream, uint32_t num_tokens, bool) override {
    if (is_open_[stream] || (waits_for_token_ && num_tokens == 0)) return;
    is_open_[stream] = true;
    num_open_ += 1;
  }

  void on_end(uint32_t) override { num_ended_ += 1; }

 private:
  std::vector<bool> is_open_;
  const bool waits_for_token_;
  uint32_t num_open_ = 0, num_ended_ = 0;
};

// `--requests` requests, `--streams` at a time. With `--leave-after N` each is cancelled after N tokens.
class Churn : public Load {
 public:
  explicit Churn(const Options& options)
      : Load(options),
        num_tokens_(num_streams_),
        leave_after_(uint32_t(options.number("leave-after", 0))),
        num_requests_(uint32_t(options.number("requests", 1000))) {}

  int run() {
    const int64_t start_ns = now_ns();
    const int64_t most_ns = start_ns + int64_t(options_.number("limit", 60) * 1e9);
    while (num_done_ < num_requests_ && now_ < most_ns && !is_any_closed()) poll(20);
    printf("{\"num_done\":%u,\"num_finished\":%u,\"num_left\":%u,\"elapsed_s\":%.4f}\n", num_done_,
           num_finished_, num_left_, double(now_ns() - start_ns) * 1e-9);
    return num_done_ >= num_requests_ ? 0 : 4;
  }

  void on_message(uint32_t stream, uint32_t num_tokens, bool is_final) override {
    num_finished_ += is_final;
    num_tokens_[stream] += num_tokens;
    if (leave_after_ == 0 || is_final || num_tokens_[stream] < leave_after_) return;
    connection_of(stream).cancel(stream);
    num_left_ += 1;
    next(stream);
  }

  void on_end(uint32_t stream) override { next(stream); }

 private:
  void next(uint32_t stream) {
    num_done_ += 1;
    num_tokens_[stream] = 0;
    if (num_done_ + num_streams_ <= num_requests_) connection_of(stream).open(stream);
  }

  std::vector<uint32_t> num_tokens_;
  const uint32_t leave_after_, num_requests_;
  uint32_t num_done_ = 0, num_finished_ = 0, num_left_ = 0;
};
