// Decisions of the client: retries, resumption, the order of a stream, error details, addresses and
// credentials. Without a server and without a clock.
#include <google/rpc/error_details.pb.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>

#include "credentials.h"
#include "penstock/client.h"
#include "penstock/requests.h"
#include "retry.h"
#include "status.h"
#include "stream_reader.h"
#include "unicode.h"

namespace {

using namespace penstock;
using namespace std::chrono_literals;

int num_failed = 0;

#define CHECK(what)                                                                  \
  do {                                                                               \
    if (!(what)) {                                                                   \
      ++num_failed;                                                                  \
      std::cerr << __FILE__ << ":" << __LINE__ << ": does not hold: " #what << "\n"; \
    }                                                                                \
  } while (false)

template <typename Exception>
bool throws(const std::function<void()>& act) {
  try {
    act();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

const Clock::time_point kNow{1000s};

Failure queue_full(std::optional<Nanoseconds> retry_after = {}) {
  return {.code = grpc::StatusCode::RESOURCE_EXHAUSTED,
          .reason = "QUEUE_FULL",
          .retry_after = retry_after};
}

Failure unavailable(const std::string& reason = "") {
  return {.code = grpc::StatusCode::UNAVAILABLE, .reason = reason};
}

void retries_follow_the_server_and_end() {
  RetryBudget budget;
  Attempts attempts({.max_attempts = 3}, budget, {}, kNow);
  CHECK(attempts.delay_after(queue_full(1s), false, kNow, 0.5) == 1100ms);
  CHECK(attempts.delay_after(unavailable(), false, kNow, 0.0) == 200ms);
  CHECK(!attempts.delay_after(unavailable(), false, kNow, 0.0).has_value());
}

void retries_stop_at_output_deadline_and_rejection() {
  RetryBudget budget;
  CHECK(!Attempts({}, budget, {}, kNow).delay_after(unavailable(), true, kNow, 0.0).has_value());
  CHECK(!Attempts({}, budget, 1s, kNow).delay_after(queue_full(1s), false, kNow, 0.0).has_value());
  Failure rejected = queue_full(1s);
  rejected.is_retry_forbidden = true;
  CHECK(!Attempts({}, budget, {}, kNow).delay_after(rejected, false, kNow, 0.0).has_value());
  CHECK(!is_transient({.code = grpc::StatusCode::RESOURCE_EXHAUSTED}));
  CHECK(!is_transient({.code = grpc::StatusCode::INTERNAL}));
  CHECK(throws<std::invalid_argument>([&] { Attempts({}, budget, 0s, kNow); }));
}

void retries_of_a_crowd_are_bounded() {
  RetryBudget budget;
  int num_taken = 0;
  while (num_taken < 1000 && budget.take()) ++num_taken;
  CHECK(num_taken == 100);
  for (int call = 0; call < 4; ++call) budget.deposit();
  CHECK(!budget.take());
  budget.deposit();
  CHECK(budget.take());
}

void a_lost_stream_is_resumed_within_its_timeout() {
  Recovery recovery(1s);
  CHECK(!recovery.delay_after(unavailable(), false, 0, kNow, 1.0).has_value());
  CHECK(recovery.delay_after(unavailable(), true, 5, kNow, 1.0) == 50ms);
  CHECK(recovery.is_under_way());
  CHECK(recovery.delay_after(unavailable(), true, 5, kNow + 100ms, 1.0) == 100ms);
  // The stream had continued: a new loss with a new resume timeout and a new first wait.
  CHECK(recovery.delay_after(unavailable(), true, 6, kNow + 5s, 1.0) == 50ms);
  CHECK(!recovery.delay_after(unavailable(), true, 6, kNow + 6s, 1.0).has_value());
  const Failure forgotten{.code = grpc::StatusCode::NOT_FOUND, .reason = "REQUEST_NOT_FOUND"};
  CHECK(recovery.explain(forgotten).code == grpc::StatusCode::UNAVAILABLE);
}

void other_failures_are_returned_unchanged() {
  Recovery none(0s);
  CHECK(!none.delay_after(unavailable(), true, 5, kNow, 1.0).has_value());
  Recovery recovery(1s);
  CHECK(!recovery.delay_after(unavailable("ENGINE_DOWN"), true, 5, kNow, 1.0).has_value());
  Recovery resumed(1s);
  resumed.begin_at(5);
  CHECK(resumed.delay_after(unavailable("ENGINE_DOWN"), true, 5, kNow, 1.0).has_value());
}

v1::GenerateResponse tokens(std::uint64_t sequence, std::uint32_t num_tokens) {
  v1::GenerateResponse response;
  response.set_sequence(sequence);
  response.mutable_tokens()->set_num_tokens(num_tokens);
  return response;
}

v1::GenerateResponse accepted() {
  v1::GenerateResponse response;
  response.mutable_accepted()->set_request_id("a");
  return response;
}

void a_stream_is_counted() {
  StreamReader reader;
  CHECK(reader.receive(accepted()));
  CHECK(!reader.has_output());
  CHECK(reader.receive(tokens(1, 3)));
  CHECK(reader.has_output());
  CHECK(reader.point().request_id == "a" && reader.point().next_sequence == 2);
  CHECK(reader.point().received_token_counts == std::vector<std::uint32_t>{3});
  CHECK(throws<StreamBroken>([&] { (void)reader.end(); }));
  v1::GenerateResponse last;
  last.set_sequence(2);
  last.mutable_finished();
  CHECK(!reader.receive(last));
  // Its status was lost, so the next attempt reads it again.
  CHECK(reader.next_point().next_sequence == 2);
  CHECK(throws<StreamBroken>([&] { (void)reader.end(); }));
  CHECK(!reader.receive(last));
  CHECK(throws<StreamBroken>([&] { reader.receive(tokens(2, 1)); }));
  CHECK(reader.end().has_finished() && reader.point().next_sequence == 3);
  CHECK(throws<StreamBroken>([&] { reader.receive(tokens(3, 1)); }));
}

void a_broken_stream_is_reported() {
  StreamReader reader;
  CHECK(throws<StreamBroken>([&] { reader.receive(tokens(0, 1)); }));
  reader.receive(accepted());
  CHECK(throws<StreamBroken>([&] { reader.receive(tokens(2, 1)); }));
  StreamReader resumed(
      ResumePoint{.request_id = "a", .next_sequence = 7, .received_token_counts = {2}});
  CHECK(resumed.receive(tokens(7, 1)));
  CHECK(resumed.point().received_token_counts == std::vector<std::uint32_t>{3});
}

void details_are_read() {
  google::rpc::ErrorInfo info;
  info.set_domain("penstock.dev");
  info.set_reason("QUEUE_FULL");
  (*info.mutable_metadata())["estimate_ms"] = "12";
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(250'000'000);
  google::rpc::BadRequest bad;
  auto* violation = bad.add_field_violations();
  violation->set_field("sampling.temperature");
  violation->set_description("too low");
  google::rpc::RequestInfo request;
  request.set_request_id("b");
  google::rpc::Status status;
  status.set_code(grpc::StatusCode::RESOURCE_EXHAUSTED);
  status.add_details()->PackFrom(info);
  status.add_details()->PackFrom(retry);
  status.add_details()->PackFrom(bad);
  status.add_details()->PackFrom(request);
  const Error error(failure_of_status(status, "a"));
  const Failure& failure = error.failure();
  CHECK(error.code() == grpc::StatusCode::RESOURCE_EXHAUSTED && error.reason() == "QUEUE_FULL");
  CHECK(failure.metadata.at("estimate_ms") == "12" && failure.retry_after == 250ms);
  CHECK(failure.field_violations.at(0).field == "sampling.temperature");
  CHECK(failure.request_id == "b");
  CHECK(std::string(error.what()) == "RESOURCE_EXHAUSTED (QUEUE_FULL)");
  status.set_code(99);
  status.mutable_details(0)->set_value("no message");
  CHECK(failure_of_status(status, "a").code == grpc::StatusCode::UNKNOWN);
  CHECK(failure_of_status(status, "a").retry_after == 250ms);
}

void pushback_is_read() {
  Failure failure = queue_full(1s);
  read_pushback("1500", failure);
  CHECK(failure.retry_after == 1500ms && !failure.is_retry_forbidden);
  read_pushback("-1", failure);
  CHECK(failure.is_retry_forbidden);
  Failure odd = queue_full();
  read_pushback("1 s", odd);
  CHECK(odd.is_retry_forbidden && !odd.retry_after.has_value());
  const Failure cancelled{.code = grpc::StatusCode::CANCELLED};
  CHECK(cancelled_to_unavailable(cancelled).code == grpc::StatusCode::UNAVAILABLE);
}

void addresses_are_read() {
  CHECK(grpc_target("host") == "host:50051");
  CHECK(grpc_target("host:1") == "host:1");
  CHECK(grpc_target("[::1]") == "[::1]:50051");
  CHECK(grpc_target("[::1]:7") == "[::1]:7");
  CHECK(grpc_target("unix:/tmp/a") == "unix:/tmp/a");
  for (const std::string bad : {"", "host:", "host:0", "host:65536", ":1", "::1", "a:b"}) {
    CHECK(throws<std::invalid_argument>([&] { grpc_target(bad); }));
  }
}

void tokens_stay_off_the_network() {
  const ClientOptions options{.token = [] { return "secret"; }};
  for (const std::string local :
       {"localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/tmp/a", "ipv4:127.0.0.1:1,127.0.0.2:1"}) {
    CHECK(!throws<std::invalid_argument>([&] { check_token_is_safe(options, local); }));
  }
  for (const std::string far :
       {"10.0.0.1:1", "dns:///example:1", "127.example:1", "ipv4:127.0.0.1:1,10.0.0.1:1"}) {
    CHECK(throws<std::invalid_argument>([&] { check_token_is_safe(options, far); }));
  }
  const ClientOptions safe{.token = options.token, .tls = TlsOptions{}};
  CHECK(!throws<std::invalid_argument>([&] { check_token_is_safe(safe, "example:1"); }));
  CHECK(authorization("abc") == "Bearer abc");
  CHECK(throws<std::invalid_argument>([] { authorization("a b"); }));
  CHECK(throws<std::invalid_argument>([] { authorization(""); }));
}

void options_are_checked() {
  const TlsOptions half{.cert = "cert.pem"};
  CHECK(throws<std::invalid_argument>([&] { Client("localhost", {.tls = half}); }));
  const TlsOptions absent{.ca = "/nonexistent/ca.pem"};
  CHECK(throws<std::invalid_argument>([&] { Client("localhost", {.tls = absent}); }));
  const RetryPolicy never{.max_attempts = 0};
  CHECK(throws<std::invalid_argument>([&] { Client("localhost", {.retry = never}); }));
  const MultiplexOptions shut{.window_tokens = 0};
  CHECK(throws<std::invalid_argument>([&] { Client("localhost", {.multiplex = shut}); }));
  CHECK(throws<std::invalid_argument>(
      [] { (void)Client("localhost").generate({}, {.num_credit_tokens = 1}); }));
}

void what_is_no_utf8_is_found() {
  for (const std::string good : {"", "a", "\xc2\x80", "\xe0\xa0\x80", "\xed\x9f\xbf",
                                 "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    CHECK(is_utf8(good) && is_utf8("a" + good + "b"));
  }
  for (const std::string bad :
       {"\x80", "\xc1\xbf", "\xc3", "\xe0\x9f\xbf", "\xe2\x82", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe2(\xa1"}) {
    CHECK(!is_utf8(bad) && !is_utf8("a" + bad + "b"));
  }
}

void fields_that_are_no_utf8_are_named() {
  auto request = chat_request({{"user", "good"}, {"user", "private\xff"}}, 4);
  request.mutable_stopping()->add_stop_strings("\xc3");
  try {
    require_utf8(request);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == grpc::StatusCode::INVALID_ARGUMENT);
    const auto& violations = error.failure().field_violations;
    CHECK(violations.size() == 2);
    CHECK(violations.at(0).field == "chat_prompt.messages[1].parts[0].text");
    CHECK(violations.at(1).field == "stopping.stop_strings[0]");
    CHECK(std::string(error.what()).find("private") == std::string::npos);
  }
  CHECK(!throws<Error>([] { require_utf8(text_request("\xe2\x82\xac", 4)); }));
}

}  // namespace

int main() {
  retries_follow_the_server_and_end();
  retries_stop_at_output_deadline_and_rejection();
  retries_of_a_crowd_are_bounded();
  a_lost_stream_is_resumed_within_its_timeout();
  other_failures_are_returned_unchanged();
  a_stream_is_counted();
  a_broken_stream_is_reported();
  details_are_read();
  pushback_is_read();
  addresses_are_read();
  tokens_stay_off_the_network();
  options_are_checked();
  what_is_no_utf8_is_found();
  fields_that_are_no_utf8_are_named();
  std::cout << (num_failed == 0 ? "all hold" : "some do not hold") << std::endl;
  return num_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
