/**
 * Many requests over shared calls, each as a separate stream, for programs that manage the credit.
 */

import { create } from "@bufbuild/protobuf";
import type { CallOptions } from "./client.js";
import { encode } from "./encoding.js";
import {
  GenerateRequestSchema,
  type GenerateRequest,
} from "./generated/penstock/v1/generation_service_pb.js";
import { GenerationStream, type StreamPlan, type StreamSource } from "./generation-stream.js";
import type { MultiplexedRequest } from "./multiplexed-requests.js";
import { Multiplexer, type MultiplexOptions } from "./multiplexer.js";
import type { GenerateInit } from "./prompts.js";
import type { Timing } from "./timing.js";
import { checkedTrace } from "./trace-context.js";
import type { Transport } from "./transport.js";

const DEFAULT_WINDOW_TOKENS = 256;
const MAX_WINDOW_TOKENS = 1 << 20;

export interface MultiplexCallOptions extends Omit<CallOptions, "metadata"> {
  /**
   * Replaces the session's window. With manual credit it is the initial credit of the request; 0
   * for none.
   */
  readonly windowTokens?: number;
  /** Only `grant` adds credit, instead of each message that is taken. */
  readonly isCreditManual?: boolean;
}

/** Creates the parts that a stream has in common with the other streams of the client. */
export type PlanStream = (
  begin: NonNullable<StreamSource["begin"]>,
  request: GenerateRequest,
  options: CallOptions,
) => [StreamSource, StreamPlan];

/** A stream on a Multiplex call. */
export class MultiplexStream extends GenerationStream {
  readonly #request: () => MultiplexedRequest | undefined;

  constructor(
    source: StreamSource,
    plan: StreamPlan,
    request: () => MultiplexedRequest | undefined,
  ) {
    super(source, plan);
    this.#request = request;
  }

  /** Allows the server to send this many more tokens. Throws before the stream is read. */
  grant(numTokens: number): void {
    this.#begun().grant(numTokens);
  }

  /**
   * Cancels the request by its key. The stream continues and ends without an error, with the
   * text so far and FINISH_REASON_CANCELLED. Throws before the stream is read.
   */
  stop(): void {
    this.#begun().stop();
  }

  #begun(): MultiplexedRequest {
    const request = this.#request();
    if (!request) throw new Error("the stream has not started: read from it first");
    return request;
  }
}

/**
 * Requests share one call: one message carries the events of a server step for all of them. Keys
 * are assigned here. If a call is lost, each request on it is retried or resumed like one with a
 * separate call, and the next request opens a new call.
 */
export class MultiplexSession {
  readonly #multiplexer: Multiplexer;
  readonly #planStream: PlanStream;
  readonly #windowTokens: number;

  constructor(
    transport: Transport,
    timing: Timing,
    planStream: PlanStream,
    options: MultiplexOptions,
  ) {
    this.#multiplexer = new Multiplexer(transport, timing, options);
    this.#planStream = planStream;
    this.#windowTokens = checkWindow(options.windowTokens ?? DEFAULT_WINDOW_TOKENS, 1);
  }

  /**
   * Streams the events of one request. `deadlineMs` is sent as its total_timeout; of `trace` only
   * `traceparent` is sent. Leaving early cancels it by its key.
   */
  generate(request: GenerateInit, options: MultiplexCallOptions = {}): MultiplexStream {
    const message = create(GenerateRequestSchema, request);
    encode(GenerateRequestSchema, message);
    checkedTrace(options.trace);
    const isManual = options.isCreditManual ?? false;
    const windowTokens = checkWindow(options.windowTokens ?? this.#windowTokens, isManual ? 0 : 1);
    // The output that the server holds back until a message is full must fit into the window.
    const minTokens = isManual ? 0 : 2 * (message.output?.minChunkTokens ?? 0);
    const credit = { windowTokens: Math.max(windowTokens, minTokens), isManual };
    let multiplexed: MultiplexedRequest | undefined;
    const begin = async (timeoutMs: number | undefined) => {
      const attempt = await this.#multiplexer.open({
        request: message,
        credit,
        context: options,
        timeoutMs,
      });
      multiplexed = attempt.request;
      return attempt;
    };
    const [source, plan] = this.#planStream(begin, message, options);
    return new MultiplexStream(source, plan, () => multiplexed);
  }

  /** Accepts no more requests. Started requests continue; the calls end with the last of them. */
  close(): void {
    this.#multiplexer.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

function checkWindow(windowTokens: number, least: number): number {
  const isInRange = windowTokens >= least && windowTokens <= MAX_WINDOW_TOKENS;
  if (!Number.isInteger(windowTokens) || !isInRange) {
    throw new RangeError(
      `windowTokens: must be an integer from ${least} to ${MAX_WINDOW_TOKENS}, not ${windowTokens}`,
    );
  }
  return windowTokens;
}
