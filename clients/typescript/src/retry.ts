/**
 * When a failed call is tried again, and after how long. Owns the policy, the account of one call's
 * attempts, and the purse that all calls of a client pay retries from. Does no I/O, does not sleep.
 */

import { status as Codes } from "@grpc/grpc-js";
import type { PenstockError } from "./errors.js";
import type { Timing } from "./timing.js";

/**
 * How often and how patiently to try again.
 *
 * The wait before attempt k+1 is drawn evenly from half to the whole of
 * `min(initialBackoffMs * multiplier**(k-1), maxBackoffMs)`. Where the server states how long to
 * wait,
 * it is that long and up to `pushbackJitter` of it longer. After gRFC A6.
 */
export interface RetryPolicy {
  readonly maxAttempts: number;
  readonly initialBackoffMs: number;
  readonly multiplier: number;
  readonly maxBackoffMs: number;
  readonly pushbackJitter: number;
}

export const DEFAULT_RETRY: RetryPolicy = {
  maxAttempts: 4,
  initialBackoffMs: 200,
  multiplier: 2,
  maxBackoffMs: 5000,
  pushbackJitter: 0.2,
};

/** Every failure is reported at once. */
export const NO_RETRY: RetryPolicy = { ...DEFAULT_RETRY, maxAttempts: 1 };

/** The default with some of it replaced. Throws RangeError naming what is out of range. */
export function retryPolicy(changes: Partial<RetryPolicy> = {}): RetryPolicy {
  const policy = { ...DEFAULT_RETRY, ...changes };
  if (!(Number.isInteger(policy.maxAttempts) && policy.maxAttempts >= 1)) {
    throw new RangeError(`maxAttempts: must be an integer from 1 on, not ${policy.maxAttempts}`);
  }
  for (const name of ["initialBackoffMs", "maxBackoffMs", "pushbackJitter"] as const) {
    if (!(Number.isFinite(policy[name]) && policy[name] >= 0)) {
      throw new RangeError(`${name}: must be finite and not negative, not ${policy[name]}`);
    }
  }
  if (!(Number.isFinite(policy.multiplier) && policy.multiplier >= 1)) {
    throw new RangeError(`multiplier: must be finite and at least 1, not ${policy.multiplier}`);
  }
  return policy;
}

/** Whether the same call may succeed a little later. */
export function isPassing(error: PenstockError): boolean {
  if (error.isRetryRefused || error.reason === "READER_STALLED") return false;
  // Bare, RESOURCE_EXHAUSTED usually means a message over a size limit, which does not pass.
  if (error.code === Codes.RESOURCE_EXHAUSTED) {
    const isFull = error.reason === "QUEUE_FULL" || error.reason === "QUOTA_EXCEEDED";
    return isFull || error.retryAfterMs !== undefined;
  }
  return error.code === Codes.UNAVAILABLE;
}

/**
 * Over any stretch, retries are at most 100 and a fifth of the calls in it: a bound per call does
 * not bound a crowd. After the retry budget of Finagle, here without a clock.
 */
export class RetryBudget {
  static readonly #SHARE = 0.2;
  static readonly #RESERVE = 100;
  #left = RetryBudget.#RESERVE;

  payIn(): void {
    this.#left = Math.min(RetryBudget.#RESERVE, this.#left + RetryBudget.#SHARE);
  }

  /** Whether one more retry may be made; it is paid for then. */
  take(): boolean {
    if (this.#left < 1) return false;
    this.#left -= 1;
    return true;
  }
}

/** The attempts of one logical call: what time is left, and whether to try again. */
export class Attempts {
  readonly #policy: RetryPolicy;
  readonly #timing: Timing;
  readonly #budget: RetryBudget;
  readonly #expiresMs: number;
  #numFailed = 0;

  /** `deadlineMs`: from now, for all attempts together. Throws RangeError unless it is positive. */
  constructor(
    policy: RetryPolicy,
    deadlineMs: number | undefined,
    budget: RetryBudget,
    timing: Timing,
  ) {
    if (deadlineMs !== undefined && !(Number.isFinite(deadlineMs) && deadlineMs > 0)) {
      throw new RangeError(`deadlineMs: must be finite and positive, not ${deadlineMs}`);
    }
    this.#policy = policy;
    this.#timing = timing;
    this.#budget = budget;
    this.#expiresMs = timing.nowMs() + (deadlineMs ?? Infinity);
    budget.payIn();
  }

  /** Time that the next attempt may take; undefined for any. */
  timeoutMs(): number | undefined {
    const leftMs = this.#leftMs();
    return leftMs === Infinity ? undefined : leftMs;
  }

  /** Count a failed attempt; the wait before the next, undefined where the error is to be reported.
   */
  delayAfter(error: PenstockError, hasOutput: boolean): number | undefined {
    this.#numFailed += 1;
    if (hasOutput || this.#numFailed >= this.#policy.maxAttempts || !isPassing(error)) {
      return undefined;
    }
    const delayMs = this.#delay(error.retryAfterMs);
    return delayMs < this.#leftMs() && this.#budget.take() ? delayMs : undefined;
  }

  #delay(retryAfterMs: number | undefined): number {
    const { initialBackoffMs, multiplier, maxBackoffMs, pushbackJitter } = this.#policy;
    const jitter = this.#timing.random();
    if (retryAfterMs !== undefined) return retryAfterMs * (1 + pushbackJitter * jitter);
    const backoffMs = Math.min(
      initialBackoffMs * multiplier ** (this.#numFailed - 1),
      maxBackoffMs,
    );
    return backoffMs * (0.5 + 0.5 * jitter);
  }

  #leftMs(): number {
    return Math.max(0, this.#expiresMs - this.#timing.nowMs());
  }
}
