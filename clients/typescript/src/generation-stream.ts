/**
 * One generation over all its attempts. Decides whether a broken stream is resumed, is started
 * again, or ends with the error, and handles a reader that leaves early. An attempt is a separate
 * call or a request on a Multiplex call.
 */

import type { Metadata } from "@grpc/grpc-js";
import { callCancelled, cancelledToUnavailable, type PenstockError } from "./errors.js";
import type { GenerateResponse } from "./generated/penstock/v1/generation_service_pb.js";
import type { Recovery, ResumePoint } from "./resume.js";
import type { Attempts } from "./retry.js";
import { errorFrom } from "./status.js";
import { StreamReader } from "./stream-reader.js";
import type { Timing } from "./timing.js";
import type { Attempt } from "./transport.js";

/** Creates the attempts. */
export interface StreamSource {
  /** Starts the request; undefined for a stream that can only be resumed. */
  readonly begin?: (timeoutMs: number | undefined) => Promise<Attempt<GenerateResponse>>;
  resume(point: ResumePoint, timeoutMs: number | undefined): Promise<Attempt<GenerateResponse>>;
  /** Cancels a request that continues after its call. Never rejects. */
  cancelRequest(requestId: string): Promise<void>;
  /** Whether this client was closed, which cancels its calls. */
  isClosed(): boolean;
}

/** The parameters of a stream, which are the same for all its attempts. */
export interface StreamPlan {
  readonly attempts: Attempts;
  readonly recovery: Recovery;
  readonly timing: Timing;
  readonly signal: AbortSignal | undefined;
  readonly point?: ResumePoint;
}

/**
 * The messages of one request, in order and without gaps: `accepted` first, `finished` last. A
 * stream that ends without an exception is complete. It can be read only once; leaving the loop
 * early cancels the request. Failures are PenstockErrors.
 */
export class GenerationStream implements AsyncIterableIterator<GenerateResponse> {
  readonly #source: StreamSource;
  readonly #plan: StreamPlan;
  readonly #events: AsyncGenerator<GenerateResponse, undefined>;
  readonly #abort = new AbortController();
  #reader: StreamReader;
  #attempt: Attempt<GenerateResponse> | undefined;

  constructor(source: StreamSource, plan: StreamPlan) {
    this.#source = source;
    this.#plan = plan;
    this.#reader = new StreamReader(plan.point);
    this.#events = this.#run();
  }

  /** The id of the request; "" before `accepted`. */
  get requestId(): string {
    return this.#reader.requestId;
  }

  /** The position at which `Client.resume` continues, in this or another process. */
  get point(): ResumePoint {
    return this.#reader.point;
  }

  /** Initial metadata of the response. Available after the first message. */
  get responseMetadata(): Metadata | undefined {
    return this.#attempt?.headers;
  }

  /** Cancels the call and the request. A reader that waits for a message gets CANCELLED. */
  cancel(): void {
    this.#abort.abort();
  }

  next(): Promise<IteratorResult<GenerateResponse, undefined>> {
    return this.#events.next();
  }

  return(): Promise<IteratorResult<GenerateResponse, undefined>> {
    this.cancel();
    return this.#events.return(undefined);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async *#run(): AsyncGenerator<GenerateResponse, undefined> {
    const onAbort = (): void => this.cancel();
    const { signal } = this.#plan;
    const isAborted = signal?.aborted ?? false;
    if (isAborted) this.cancel();
    signal?.addEventListener("abort", onAbort, { once: true });
    let isLeft = true;
    try {
      for (;;) {
        let delayMs: number | undefined;
        try {
          yield* this.#read();
          isLeft = false;
          return undefined;
        } catch (failed) {
          const error = this.#errorFrom(failed);
          delayMs = this.#abort.signal.aborted ? undefined : this.#delayAfter(error);
          if (delayMs === undefined) {
            isLeft = this.#abort.signal.aborted;
            throw this.#plan.recovery.explain(error);
          }
        }
        await this.#sleep(delayMs);
      }
    } finally {
      signal?.removeEventListener("abort", onAbort);
      if (isLeft && this.#outlivesCall()) await this.#source.cancelRequest(this.requestId);
    }
  }

  /** Reads one attempt to its end. */
  async *#read(): AsyncGenerator<GenerateResponse, void> {
    if (this.#abort.signal.aborted) throw this.#cancelled();
    const attempt = await this.#start();
    this.#attempt = attempt;
    const onAbort = (): void => attempt.cancel();
    this.#abort.signal.addEventListener("abort", onAbort, { once: true });
    // The signal may have been aborted before a listener was added.
    if (this.#abort.signal.aborted) attempt.cancel();
    try {
      for await (const response of attempt.responses) {
        if (this.#reader.receive(response)) yield response;
      }
      yield this.#reader.end();
    } finally {
      this.#abort.signal.removeEventListener("abort", onAbort);
      attempt.cancel();
    }
  }

  /** Returns whether the server continues the request although its stream is not read. */
  #outlivesCall(): boolean {
    const { requestId, isFinished } = this.#reader;
    const isKnown = requestId !== "" && !isFinished;
    return isKnown && this.#plan.recovery.isPossible && !this.#source.isClosed();
  }

  #start(): Promise<Attempt<GenerateResponse>> {
    const { attempts, recovery } = this.#plan;
    const timeoutMs = attempts.timeoutMs();
    const { begin } = this.#source;
    return begin && !recovery.isUnderWay
      ? begin(timeoutMs)
      : this.#source.resume(this.#reader.nextPoint(), timeoutMs);
  }

  #errorFrom(failed: unknown): PenstockError {
    const { requestId } = this.#reader;
    if (this.#abort.signal.aborted) return this.#cancelled(failed);
    if (this.#source.isClosed()) return callCancelled("the client was closed", requestId, failed);
    const error = errorFrom(failed, requestId);
    return requestId === "" ? cancelledToUnavailable(error) : error;
  }

  #cancelled(cause?: unknown): PenstockError {
    const reason: unknown = this.#plan.signal?.aborted ? this.#plan.signal.reason : cause;
    return callCancelled("the client cancelled the request", this.#reader.requestId, reason);
  }

  /** Returns the wait before the next attempt; undefined to report the error. */
  #delayAfter(error: PenstockError): number | undefined {
    const { attempts, recovery } = this.#plan;
    const delayMs = recovery.delayAfter(error, this.#reader.point);
    if (delayMs !== undefined) return delayMs;
    // Resuming again is safe, because nothing is delivered twice.
    if (!this.#source.begin) return attempts.delayAfter(error, false);
    const again = attempts.delayAfter(recovery.explain(error), this.#reader.hasOutput);
    if (again !== undefined) this.#reader = new StreamReader();
    return again;
  }

  async #sleep(delayMs: number): Promise<void> {
    try {
      await this.#plan.timing.sleep(delayMs, this.#abort.signal);
    } catch (failed) {
      throw this.#errorFrom(failed);
    }
  }
}
