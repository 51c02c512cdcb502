/**
 * Resumption of a stream after a lost connection: the position, and how long it is tried. Tracks
 * the lost connections of one stream. Does no I/O.
 */

import { status as Codes } from "@grpc/grpc-js";
import type { PenstockError } from "./errors.js";
import type { Timing } from "./timing.js";

const FIRST_DELAY_MS = 50;
const MAX_DELAY_MS = 1000;

/**
 * The position up to which the stream of a request was read. With it another process can continue
 * the stream.
 */
export interface ResumePoint {
  readonly requestId: string;
  /** Sequence number of the next message. */
  readonly nextSequence: bigint;
  /** Number of tokens received of each output, by output index. */
  readonly receivedTokenCounts: readonly number[];
}

/**
 * The lost connections of one stream. Each is followed by a Resume within `resumeTimeoutMs`, or
 * reported.
 */
export class Recovery {
  readonly #resumeTimeoutMs: number;
  readonly #timing: Timing;
  #first: PenstockError | undefined;
  #lostAtMs = 0;
  #sequence = -1n;
  #numFailed = 0;
  /** True if the next attempt is a Resume. */
  isUnderWay = false;

  /**
   * If `resumeTimeoutMs` is 0, a loss is reported immediately. `startSequence` is the position
   * of a stream that begins with a Resume.
   */
  constructor(resumeTimeoutMs: number, timing: Timing, startSequence?: bigint) {
    this.#resumeTimeoutMs = resumeTimeoutMs;
    this.#timing = timing;
    if (startSequence !== undefined) {
      this.isUnderWay = true;
      this.#sequence = startSequence;
    }
  }

  get isPossible(): boolean {
    return this.#resumeTimeoutMs > 0;
  }

  /** Returns the wait before the stream is resumed; undefined if it cannot be resumed. */
  delayAfter(error: PenstockError, point: ResumePoint): number | undefined {
    const hasProgressed = point.nextSequence > this.#sequence;
    // No engine runs from which the stream could be resumed. A stream that has continued gets the
    // same error when the request itself fails.
    const isOutOfReach = this.isUnderWay && !hasProgressed && error.reason === "ENGINE_DOWN";
    const isMendable = this.isPossible && point.requestId !== "";
    this.isUnderWay = false;
    if (!isMendable || !(isLoss(error) || isOutOfReach)) return undefined;
    const nowMs = this.#timing.nowMs();
    if (this.#first === undefined || hasProgressed) {
      // The stream had continued, so this is a new loss with a new resume timeout.
      this.#first = error;
      this.#lostAtMs = nowMs;
      this.#numFailed = 0;
    }
    this.#sequence = point.nextSequence;
    const backoffMs = Math.min(MAX_DELAY_MS, FIRST_DELAY_MS * 2 ** Math.min(this.#numFailed, 10));
    this.#numFailed += 1;
    const jitteredMs = backoffMs * (0.5 + 0.5 * this.#timing.random());
    const delayMs = Math.max(jitteredMs, error.retryAfterMs ?? 0);
    if (nowMs + delayMs > this.#lostAtMs + this.#resumeTimeoutMs) return undefined;
    this.isUnderWay = true;
    return delayMs;
  }

  /** Returns the error to report. If the request was not found, that is the original loss. */
  explain(error: PenstockError): PenstockError {
    return error.reason === "REQUEST_NOT_FOUND" && this.#first ? this.#first : error;
  }
}

/** Returns whether the request may still be live although its stream was lost. */
function isLoss(error: PenstockError): boolean {
  if (error.reason === "STREAM_BROKEN") return true;
  // grpc-js reports INTERNAL for a stream that the peer has reset. Servers send a reason with
  // INTERNAL.
  if (error.code === Codes.INTERNAL) return error.reason === "" && /RST_STREAM/.test(error.message);
  return error.code === Codes.UNAVAILABLE && error.reason !== "ENGINE_DOWN";
}
