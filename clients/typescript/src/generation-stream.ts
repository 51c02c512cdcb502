/**
 * One generation over all its attempts. Owns the choice between continuing where a stream broke
 * off,
 * beginning it again and reporting the error, and what leaving early means. Does not know how an
 * attempt is made: a separate call, or a request on a Multiplex call.
 */

import type { Metadata } from "@grpc/grpc-js";
import { callCancelled, unlessAsked, type PenstockError } from "./errors.js";
import type { GenerateResponse } from "./generated/penstock/v1/generation_service_pb.js";
import type { Recovery, ResumePoint } from "./resume.js";
import type { Attempts } from "./retry.js";
import { errorFrom } from "./status.js";
import { StreamReader } from "./stream-reader.js";
import type { Timing } from "./timing.js";
import type { Attempt } from "./transport.js";

/** Where attempts come from. */
export interface StreamSource {
  /** Begin the request; undefined for a stream that can only be resumed. */
  readonly begin?: (timeoutMs: number | undefined) => Promise<Attempt<GenerateResponse>>;
  resume(point: ResumePoint, timeoutMs: number | undefined): Promise<Attempt<GenerateResponse>>;
  /** End a request that outlives its call. Never rejects. */
  cancelRequest(requestId: string): Promise<void>;
  /** Whether this client was closed, which cancels its calls. */
  isClosed(): boolean;
}

/** What is known of a stream before its first attempt. */
export interface StreamPlan {
  readonly attempts: Attempts;
  readonly recovery: Recovery;
  readonly timing: Timing;
  readonly signal: AbortSignal | undefined;
  readonly point?: ResumePoint;
}

/**
 * The messages of one request, in order and without a gap: `accepted` first, `finished` last. An end
 * without an exception is a whole output. It is read once; leaving the loop early cancels the
 * request. Failures are PenstockErrors.
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

  /** The request's id, "" before `accepted`. */
  get requestId(): string {
    return this.#reader.requestId;
  }

  /** Where `Client.resume` would continue, here or in another process. */
  get point(): ResumePoint {
    return this.#reader.point;
  }

  /** Initial metadata of the answer, there once the first message is. */
  get responseMetadata(): Metadata | undefined {
    return this.#attempt?.headers;
  }

  /** End the call and the request. A caller that waits for a message meets CANCELLED. */
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
      if (isLeft && this.#livesOn()) await this.#source.cancelRequest(this.requestId);
    }
  }

  /** One attempt, to its end. */
  async *#read(): AsyncGenerator<GenerateResponse, void> {
    if (this.#abort.signal.aborted) throw this.#cancelled();
    const attempt = await this.#start();
    this.#attempt = attempt;
    const onAbort = (): void => attempt.cancel();
    this.#abort.signal.addEventListener("abort", onAbort, { once: true });
    // An abort while the attempt was being made came before any client listened.
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

  /** Whether the server continues with the request although no client reads it. */
  #livesOn(): boolean {
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
    return requestId === "" ? unlessAsked(error) : error;
  }

  #cancelled(cause?: unknown): PenstockError {
    const reason: unknown = this.#plan.signal?.aborted ? this.#plan.signal.reason : cause;
    return callCancelled("the client cancelled the request", this.#reader.requestId, reason);
  }

  /** The wait before the next attempt; undefined where the error is to be reported. */
  #delayAfter(error: PenstockError): number | undefined {
    const { attempts, recovery } = this.#plan;
    const delayMs = recovery.delayAfter(error, this.#reader.point);
    if (delayMs !== undefined) return delayMs;
    // To resume again costs nothing: nothing is delivered twice.
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
