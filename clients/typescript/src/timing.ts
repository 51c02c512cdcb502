/** Where time and chance come from, so that tests can bring their own. */

import { setTimeout as sleep } from "node:timers/promises";

export interface Timing {
  /** Milliseconds of a clock that never goes back. */
  nowMs(): number;
  /** Evenly from [0, 1). */
  random(): number;
  /** Rejects when `signal` aborts. */
  sleep(delayMs: number, signal: AbortSignal): Promise<void>;
}

export const SYSTEM_TIMING: Timing = {
  nowMs: () => performance.now(),
  random: Math.random,
  sleep: (delayMs, signal) => sleep(delayMs, undefined, { signal }),
};
