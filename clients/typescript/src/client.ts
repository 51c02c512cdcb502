/**
 * The client. Owns one connection and what is common to its calls: retry policy and budget, token,
 * metadata. Everything about one stream is in generation-stream.ts.
 */

import {
  create,
  type DescMessage,
  type DescMethodUnary,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { encode } from "./encoding.js";
import { callCancelled, unlessAsked } from "./errors.js";
import {
  CancelRequestSchema,
  GenerateOnceRequestSchema,
  GenerateRequestSchema,
  GenerationService,
  ResumeRequestSchema,
  type GenerateOnceResponse,
  type GenerateRequest,
  type GenerateResponse,
  type ResumeResponse,
} from "./generated/penstock/v1/generation_service_pb.js";
import {
  DetokenizeRequestSchema,
  GetModelRequestSchema,
  ListModelsRequestSchema,
  ModelService,
  TokenizeRequestSchema,
  type TokenizeResponse,
} from "./generated/penstock/v1/model_service_pb.js";
import type { ModelInfo } from "./generated/penstock/v1/model_pb.js";
import type { RequestState } from "./generated/penstock/v1/state_pb.js";
import { GenerationStream, type StreamPlan } from "./generation-stream.js";
import type { Headers } from "./headers.js";
import { MultiplexSession } from "./multiplex-session.js";
import type { MultiplexOptions } from "./multiplexer.js";
import type { GenerateInit } from "./prompts.js";
import { Recovery, type ResumePoint } from "./resume.js";
import { Attempts, RetryBudget, retryPolicy, type RetryPolicy } from "./retry.js";
import { errorFrom } from "./status.js";
import { SYSTEM_TIMING, type Timing } from "./timing.js";
import type { TraceContext } from "./trace-context.js";
import { Transport, type Attempt, type ConnectionOptions } from "./transport.js";

const CONTROL_DEADLINE_MS = 10_000;
const LEAVING_DEADLINE_MS = 2000;
const MAX_PAGES = 1000;

export interface ClientOptions extends ConnectionOptions {
  /** What differs from `DEFAULT_RETRY`; `NO_RETRY` reports every failure at once. */
  readonly retry?: Partial<RetryPolicy>;
  /** For tests. */
  readonly timing?: Timing;
}

/** What may be stated of one call. */
export interface CallOptions {
  /** Time for the call, all its attempts together; it travels as the gRPC deadline. */
  readonly deadlineMs?: number;
  /** Cancels the call, and the request on the server. */
  readonly signal?: AbortSignal;
  readonly metadata?: Headers;
  readonly trace?: TraceContext;
  /** In place of the client's policy. */
  readonly retry?: Partial<RetryPolicy>;
}

export interface ResumeOptions extends CallOptions {
  /**
   * For how long lost connections are made good again, and that leaving early cancels the request:
   * the request's own resumeTimeout. Default 0.
   */
  readonly graceMs?: number;
}

/** One connection to a server. All calls fail with PenstockError. */
export class Client {
  readonly #transport: Transport;
  readonly #timing: Timing;
  readonly #retry: RetryPolicy;
  readonly #budget = new RetryBudget();

  /**
   * `address`: HOST, HOST:PORT or a gRPC target. Throws TypeError or RangeError naming what is
   * wrong. Nothing is sent before the first call.
   */
  constructor(address: string, options: ClientOptions = {}) {
    this.#retry = retryPolicy(options.retry);
    this.#timing = options.timing ?? SYSTEM_TIMING;
    this.#transport = new Transport(address, options);
  }

  /**
   * The events of one request. Where it asks for a `resumeTimeout`, a lost connection is made
   * good by Resume, and no client notices.
   */
  generate(request: GenerateInit, options: CallOptions = {}): GenerationStream {
    const message = create(GenerateRequestSchema, request);
    const bytes = encode(GenerateRequestSchema, message);
    return this.#stream(
      (timeoutMs) =>
        this.#transport.stream(GenerationService.method.generate, bytes, options, timeoutMs),
      this.#plan(message, options),
      options,
    );
  }

  /** The text of a request, as it comes. Throws RangeError for one with several outputs. */
  generateText(request: GenerateInit, options: CallOptions = {}): AsyncGenerator<string, void> {
    const n = request.sampling?.numOutputs ?? 1;
    if (n > 1)
      throw new RangeError(`sampling.num_outputs: a stream of text has one output, not ${n}`);
    return textOf(this.generate(request, options));
  }

  /** A whole generation. Nothing comes before the end, so give a deadline. */
  generateOnce(request: GenerateInit, options: CallOptions = {}): Promise<GenerateOnceResponse> {
    const message = create(GenerateOnceRequestSchema, { generation: request });
    return this.#unary(GenerationService.method.generateOnce, message, options);
  }

  /** The rest of a request's stream from `point` on, on whichever connection it was begun. */
  resume(point: ResumePoint, options: ResumeOptions = {}): GenerationStream {
    const { graceMs = 0 } = options;
    const plan = {
      ...this.#plan(undefined, options),
      recovery: new Recovery(graceMs, this.#timing, point.nextSequence),
      point,
    };
    return this.#stream(undefined, plan, options);
  }

  /** Cancel a request wherever it was submitted; where it stood. */
  async cancel(requestId: string, options: CallOptions = {}): Promise<RequestState> {
    const message = create(CancelRequestSchema, { requestId });
    return (await this.#control(GenerationService.method.cancel, message, options)).state;
  }

  /** Many requests over one call, with credit: for gateways. */
  multiplex(options: MultiplexOptions = {}): MultiplexSession {
    return new MultiplexSession(
      this.#transport,
      this.#timing,
      (begin, request, call) => [{ ...this.#source(call), begin }, this.#plan(request, call)],
      options,
    );
  }

  /** The model of this name; of none, the server's default. */
  async getModel(name?: string, options: CallOptions = {}): Promise<ModelInfo> {
    const message = create(GetModelRequestSchema, name === undefined ? {} : { name });
    const { model } = await this.#control(ModelService.method.getModel, message, options);
    return present(model, "GetModelResponse.model");
  }

  /** All models of the server. */
  async listModels(options: CallOptions = {}): Promise<ModelInfo[]> {
    const models: ModelInfo[] = [];
    let pageToken = "";
    for (let page = 0; page < MAX_PAGES; page++) {
      const message = create(ListModelsRequestSchema, { pageToken });
      const answer = await this.#control(ModelService.method.listModels, message, options);
      models.push(...answer.models);
      pageToken = answer.nextPageToken;
      if (pageToken === "") break;
    }
    return models;
  }

  /** Token ids of a text or dialogue. */
  tokenize(
    request: MessageInitShape<typeof TokenizeRequestSchema>,
    options: CallOptions = {},
  ): Promise<TokenizeResponse> {
    const message = create(TokenizeRequestSchema, request);
    return this.#control(ModelService.method.tokenize, message, options);
  }

  /** The text of token ids. */
  async detokenize(
    request: MessageInitShape<typeof DetokenizeRequestSchema>,
    options: CallOptions = {},
  ): Promise<string> {
    const message = create(DetokenizeRequestSchema, request);
    return (await this.#control(ModelService.method.detokenize, message, options)).text;
  }

  /** Cancel what is open and hang up. Requests with a grace period can be resumed elsewhere. */
  close(): void {
    this.#transport.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #stream(
    begin: StreamBeginning | undefined,
    plan: StreamPlan,
    options: CallOptions,
  ): GenerationStream {
    this.#transport.check(options);
    return new GenerationStream({ ...this.#source(options), ...(begin ? { begin } : {}) }, plan);
  }

  #source(options: CallOptions) {
    return {
      resume: async (point: ResumePoint, timeoutMs: number | undefined) => {
        const bytes = encode(
          ResumeRequestSchema,
          create(ResumeRequestSchema, {
            ...point,
            receivedTokenCounts: [...point.receivedTokenCounts],
          }),
        );
        const { resume } = GenerationService.method;
        return resumed(await this.#transport.stream(resume, bytes, options, timeoutMs));
      },
      cancelRequest: async (requestId: string) => {
        const leaving = { metadata: options.metadata ?? {}, deadlineMs: LEAVING_DEADLINE_MS };
        // What fails here ends with its grace period.
        await this.cancel(requestId, leaving).catch(() => undefined);
      },
      isClosed: () => this.#transport.isClosed,
    };
  }

  #plan(request: GenerateRequest | undefined, options: CallOptions): StreamPlan {
    const grace = request?.resumeTimeout;
    return {
      attempts: this.#attempts(options),
      recovery: new Recovery(grace ? durationMs(grace) : 0, this.#timing),
      timing: this.#timing,
      signal: options.signal,
    };
  }

  #attempts({ deadlineMs, retry }: CallOptions): Attempts {
    const policy = retry ? retryPolicy(retry) : this.#retry;
    return new Attempts(policy, deadlineMs, this.#budget, this.#timing);
  }

  #control<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    return this.#unary(method, request, { deadlineMs: CONTROL_DEADLINE_MS, ...options });
  }

  async #unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    const { signal } = options;
    const bytes = encode(method.input, request);
    const attempts = this.#attempts(options);
    for (;;) {
      try {
        return await this.#transport.unary(method, bytes, options, attempts.timeoutMs(), signal);
      } catch (failed) {
        if (signal?.aborted) throw callCancelled("the caller cancelled it", "", signal.reason);
        if (this.#transport.isClosed) throw callCancelled("the client was closed", "", failed);
        const error = unlessAsked(errorFrom(failed));
        const delayMs = attempts.delayAfter(error, false);
        if (delayMs === undefined) throw error;
        await this.#sleep(delayMs, signal);
      }
    }
  }

  async #sleep(delayMs: number, signal: AbortSignal = new AbortController().signal): Promise<void> {
    try {
      await this.#timing.sleep(delayMs, signal);
    } catch (failed) {
      throw callCancelled("the caller cancelled it", "", signal.reason ?? failed);
    }
  }
}

type StreamBeginning = (timeoutMs: number | undefined) => Promise<Attempt<GenerateResponse>>;

/** A Resume call as the stream that it continues with. */
function resumed(attempt: Attempt<ResumeResponse>): Attempt<GenerateResponse> {
  return {
    responses: responsesOf(attempt),
    get headers() {
      return attempt.headers;
    },
    cancel: () => attempt.cancel(),
  };
}

async function* textOf(stream: GenerationStream): AsyncGenerator<string, void> {
  for await (const { event } of stream) {
    if (event.case === "tokens" && event.value.text !== "") yield event.value.text;
  }
}

async function* responsesOf(
  attempt: Attempt<ResumeResponse>,
): AsyncGenerator<GenerateResponse, void> {
  for await (const { response } of attempt.responses) {
    yield present(response, "ResumeResponse.response");
  }
}

function present<T>(value: T | undefined, name: string): T {
  if (value === undefined) throw new TypeError(`the server left ${name} out`);
  return value;
}
