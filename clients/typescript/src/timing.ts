/** The sources of time and random numbers, which tests replace. */

import { setTimeout as sleep } from "node:timers/promises";

export interface Timing {
  /** Milliseconds of a monotonic clock. */
  nowMs(): number;
  /** A uniform random number in [0, 1). */
  random(): number;
  /** Waits. Rejects when `signal` is aborted. */
  sleep(delayMs: number, signal: AbortSignal): Promise<void>;
}

export const SYSTEM_TIMING: Timing = {
  nowMs: () => performance.now(),
  random: Math.random,
  sleep: (delayMs, signal) => sleep(delayMs, undefined, { signal }),
};
