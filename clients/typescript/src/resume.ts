/**
 * How a stream continues after its connection was lost: from where, and for how long it is tried.
 * Owns the point a stream has come to, and the account of one stream's losses. Does no I/O.
 */

import { status as Codes } from "@grpc/grpc-js";
import type { PenstockError } from "./errors.js";
import type { Timing } from "./timing.js";

const FIRST_DELAY_MS = 50;
const MAX_DELAY_MS = 1000;

/** How far a request's stream was read: all that another process needs to continue with it. */
export interface ResumePoint {
  readonly requestId: string;
  /** Sequence of the next message. */
  readonly nextSequence: bigint;
  /** Tokens of each output so far, by output index. */
  readonly receivedTokenCounts: readonly number[];
}

/** The losses of one stream, each of which is made good within `graceMs`, or reported. */
export class Recovery {
  readonly #graceMs: number;
  readonly #timing: Timing;
  #first: PenstockError | undefined;
  #lostAtMs = 0;
  #sequence = -1n;
  #numFailed = 0;
  /** The next attempt is a Resume. */
  isUnderWay = false;

  /** `graceMs` 0: a loss is reported at once. `startSequence`: of a stream that begins with Resume.
   */
  constructor(graceMs: number, timing: Timing, startSequence?: bigint) {
    this.#graceMs = graceMs;
    this.#timing = timing;
    if (startSequence !== undefined) {
      this.isUnderWay = true;
      this.#sequence = startSequence;
    }
  }

  get isPossible(): boolean {
    return this.#graceMs > 0;
  }

  /** The wait before the stream is resumed; undefined where it cannot be. */
  delayAfter(error: PenstockError, point: ResumePoint): number | undefined {
    const hasGoneOn = point.nextSequence > this.#sequence;
    // Then there is no engine it could be fetched over; a stream that has continued is reported so
    // of the request itself.
    const isOutOfReach = this.isUnderWay && !hasGoneOn && error.reason === "ENGINE_DOWN";
    const isMendable = this.isPossible && point.requestId !== "";
    this.isUnderWay = false;
    if (!isMendable || !(isLoss(error) || isOutOfReach)) return undefined;
    const nowMs = this.#timing.nowMs();
    if (this.#first === undefined || hasGoneOn) {
      // It had continued: this is a new loss, with a separate grace.
      this.#first = error;
      this.#lostAtMs = nowMs;
      this.#numFailed = 0;
    }
    this.#sequence = point.nextSequence;
    const backoffMs = Math.min(MAX_DELAY_MS, FIRST_DELAY_MS * 2 ** Math.min(this.#numFailed, 10));
    this.#numFailed += 1;
    const jitteredMs = backoffMs * (0.5 + 0.5 * this.#timing.random());
    const delayMs = Math.max(jitteredMs, error.retryAfterMs ?? 0);
    if (nowMs + delayMs > this.#lostAtMs + this.#graceMs) return undefined;
    this.isUnderWay = true;
    return delayMs;
  }

  /** That no client knows the request any more is only the end of a story that began with the loss.
   */
  explain(error: PenstockError): PenstockError {
    return error.reason === "REQUEST_NOT_FOUND" && this.#first ? this.#first : error;
  }
}

/** Whether the request may live on although its stream broke off. */
function isLoss(error: PenstockError): boolean {
  if (error.reason === "STREAM_BROKEN") return true;
  // What grpc-js makes of a stream that the other side reset. Servers give a reason for INTERNAL.
  if (error.code === Codes.INTERNAL) return error.reason === "" && /RST_STREAM/.test(error.message);
  return error.code === Codes.UNAVAILABLE && error.reason !== "ENGINE_DOWN";
}
