/** Rules that need no server: addresses, credentials, retries. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { status as Codes } from "@grpc/grpc-js";
import { channelOptions, grpcTarget } from "../src/channel.js";
import { channelCredentials, checkToken } from "../src/credentials.js";
import { PenstockError } from "../src/errors.js";
import { Recovery } from "../src/resume.js";
import { Attempts, isTransient, NO_RETRY, RetryBudget, retryPolicy } from "../src/retry.js";
import type { Timing } from "../src/timing.js";

function failed(code: Codes, reason = "", retryAfterMs?: number): PenstockError {
  return new PenstockError({ code, message: "failed", reason, retryAfterMs });
}

/** A clock that stops until it is set. */
function standing(): Timing & { timeMs: number } {
  return {
    timeMs: 0,
    nowMs() {
      return this.timeMs;
    },
    random: () => 0,
    sleep: () => Promise.resolve(),
  };
}

test("addresses", () => {
  const good = { "127.0.0.1": "127.0.0.1:50051", "[::1]:7": "[::1]:7", "dns:///a:1": "dns:///a:1" };
  for (const [address, target] of Object.entries(good)) assert.equal(grpcTarget(address), target);
  for (const address of ["", "a b", "a:0", "a:99999", "a:", "[zz]:1", "http://a:1"]) {
    assert.throws(() => grpcTarget(address), TypeError, address);
  }
});

test("targets of several servers are dealt calls in turn", () => {
  const key = "grpc.service_config";
  assert.match(String(channelOptions("dns:///a:1", {})[key]), /round_robin/);
  assert.equal(channelOptions("127.0.0.1:1", {})[key], undefined);
  assert.throws(() => channelOptions("a:1", { keepaliveMs: 10 }), /keepaliveMs/);
});

test("the text of an error has every invalid field once", () => {
  const error = new PenstockError({
    code: Codes.INVALID_ARGUMENT,
    message: "bad request: stopping.max_tokens: too many (and 20 more)",
    fieldViolations: [
      { field: "stopping.max_tokens", description: "too many" },
      { field: "sampling.top_p", description: "must be in (0, 1]" },
    ],
    info: { num_more_violations: "19" },
  });
  const text =
    "INVALID_ARGUMENT: bad request: stopping.max_tokens: too many;" +
    " sampling.top_p: must be in (0, 1]; and 19 more";
  assert.equal(error.message, text);
});

test("a token does not cross a network in plain text", () => {
  for (const target of [
    "127.0.0.1:1",
    "localhost:1",
    "[::1]:1",
    "unix:/tmp/x",
    "dns:///localhost:1",
  ]) {
    checkToken("secret", target, false);
  }
  for (const target of ["10.0.0.1:1", "127.0.0.1.example.com:1", "ipv4:127.0.0.1:1,10.0.0.1:1"]) {
    assert.throws(() => checkToken("secret", target, false), /plain text/, target);
    checkToken("secret", target, true);
  }
  assert.throws(() => checkToken("two words", "127.0.0.1:1", false), TypeError);
  assert.throws(() => channelCredentials({ cert: Buffer.from("x") }), TypeError);
});

test("what may succeed a little later", () => {
  assert.ok(isTransient(failed(Codes.UNAVAILABLE)));
  assert.ok(isTransient(failed(Codes.RESOURCE_EXHAUSTED, "QUEUE_FULL")));
  assert.ok(isTransient(failed(Codes.RESOURCE_EXHAUSTED, "", 5)));
  assert.ok(!isTransient(failed(Codes.RESOURCE_EXHAUSTED)));
  assert.ok(!isTransient(failed(Codes.RESOURCE_EXHAUSTED, "READER_STALLED", 5)));
  assert.ok(!isTransient(failed(Codes.UNAVAILABLE, "DRAINING").with({ isRetryForbidden: true })));
  assert.ok(!isTransient(failed(Codes.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE", 5)));
});

test("waits grow, end with the attempts, and do not outlast the deadline", () => {
  const timing = standing();
  const error = failed(Codes.UNAVAILABLE);
  const attempts = new Attempts(retryPolicy(), undefined, new RetryBudget(), timing);
  const waits = [1, 2, 3, 4].map(() => attempts.delayAfter(error, false));
  assert.deepEqual(waits, [100, 200, 400, undefined]);
  const hasty = new Attempts(retryPolicy(), 90, new RetryBudget(), timing);
  assert.equal(hasty.delayAfter(error, false), undefined);
  const once = new Attempts(NO_RETRY, undefined, new RetryBudget(), timing);
  assert.equal(once.delayAfter(error, false), undefined);
  assert.throws(() => retryPolicy({ maxAttempts: 0 }), /maxAttempts/);
});

test("a crowd of calls retries a fifth of the time, beyond the reserve", () => {
  const budget = new RetryBudget();
  for (let count = 0; count < 100; count++) assert.ok(budget.take());
  assert.ok(!budget.take());
  for (let count = 0; count < 6; count++) budget.deposit();
  assert.ok(budget.take());
  assert.ok(!budget.take());
});

test("a lost stream is resumed within its timeout, which progress restarts", () => {
  const timing = standing();
  const recovery = new Recovery(1000, timing);
  const lost = failed(Codes.UNAVAILABLE);
  const at = (nextSequence: bigint) => ({ requestId: "r", nextSequence, receivedTokenCounts: [] });
  assert.equal(recovery.delayAfter(lost, at(3n)), 25);
  timing.timeMs = 980;
  assert.equal(recovery.delayAfter(lost, at(3n)), undefined);
  assert.equal(recovery.delayAfter(lost, at(4n)), 25);
  assert.equal(recovery.delayAfter(failed(Codes.INTERNAL, "INTERNAL"), at(4n)), undefined);
  assert.equal(recovery.explain(failed(Codes.NOT_FOUND, "REQUEST_NOT_FOUND")), lost);
  const reset = failed(Codes.INTERNAL).with({ message: "Received RST_STREAM with code 2" });
  assert.notEqual(recovery.delayAfter(reset, at(5n)), undefined);
});
