/**
 * Decides whether and after what delay a failed call is retried: the policy, the attempts of one
 * call, and the retry budget that all calls of a client share. Does no I/O and does not sleep.
 */

import { status as Codes } from "@grpc/grpc-js";
import type { PenstockError } from "./errors.js";
import type { Timing } from "./timing.js";

/**
 * How often and after what delay a call is retried.
 *
 * The wait before attempt k+1 is random, from half to all of `min(initialBackoffMs *
 * multiplier**(k-1), maxBackoffMs)`. A retry delay from the server replaces it; up to
 * `pushbackJitter` of it is added. As in gRFC A6.
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

/** No retries: each failure is reported immediately. */
export const NO_RETRY: RetryPolicy = { ...DEFAULT_RETRY, maxAttempts: 1 };

/**
 * Returns the default policy with some fields replaced. Throws RangeError, which names the field
 * that is out of range.
 */
export function retryPolicy(changes: Partial<RetryPolicy> = {}): RetryPolicy {
  const policy = { ...DEFAULT_RETRY, ...changes };
  if (!(Number.isInteger(policy.maxAttempts) && policy.maxAttempts >= 1)) {
    throw new RangeError(
      `maxAttempts: must be an integer of at least 1, not ${policy.maxAttempts}`,
    );
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

/** Returns whether the same call may succeed soon. */
export function isTransient(error: PenstockError): boolean {
  if (error.isRetryForbidden || error.reason === "READER_STALLED") return false;
  // Without details, RESOURCE_EXHAUSTED usually means a message over a size limit, which is
  // permanent.
  if (error.code === Codes.RESOURCE_EXHAUSTED) {
    const isFull = error.reason === "QUEUE_FULL" || error.reason === "QUOTA_EXCEEDED";
    return isFull || error.retryAfterMs !== undefined;
  }
  return error.code === Codes.UNAVAILABLE;
}

/**
 * Over any period, retries are at most 100 plus a fifth of the calls in it. A limit per call does
 * not limit the total. It is the retry budget of Finagle, here without a clock.
 */
export class RetryBudget {
  static readonly #SHARE = 0.2;
  static readonly #RESERVE = 100;
  #left = RetryBudget.#RESERVE;

  deposit(): void {
    this.#left = Math.min(RetryBudget.#RESERVE, this.#left + RetryBudget.#SHARE);
  }

  /** Deducts one retry. Returns whether the budget had one. */
  take(): boolean {
    if (this.#left < 1) return false;
    this.#left -= 1;
    return true;
  }
}

/** The attempts of one logical call: the remaining time, and whether to try again. */
export class Attempts {
  readonly #policy: RetryPolicy;
  readonly #timing: Timing;
  readonly #budget: RetryBudget;
  readonly #expiresMs: number;
  #numFailed = 0;

  /**
   * `deadlineMs` is the time for all attempts, from now. Throws RangeError unless it is positive.
   */
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
    budget.deposit();
  }

  /** Time that the next attempt may take; undefined without a deadline. */
  timeoutMs(): number | undefined {
    const leftMs = this.#leftMs();
    return leftMs === Infinity ? undefined : leftMs;
  }

  /**
   * Counts a failed attempt. Returns the wait before the next one, undefined to report the error.
   */
  delayAfter(error: PenstockError, hasOutput: boolean): number | undefined {
    this.#numFailed += 1;
    if (hasOutput || this.#numFailed >= this.#policy.maxAttempts || !isTransient(error)) {
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
