/**
 * The client: one connection, and the settings common to its calls: retry policy and budget, token,
 * metadata. generation-stream.ts handles the streams.
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
import { callCancelled, cancelledToUnavailable } from "./errors.js";
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
  /** Fields that replace those of `DEFAULT_RETRY`. `NO_RETRY` disables retries. */
  readonly retry?: Partial<RetryPolicy>;
  /** For tests. */
  readonly timing?: Timing;
}

/** Options of one call. */
export interface CallOptions {
  /** Time for the call, with all its attempts. It is sent as the gRPC deadline. */
  readonly deadlineMs?: number;
  /** Cancels the call, and the request on the server. */
  readonly signal?: AbortSignal;
  readonly metadata?: Headers;
  readonly trace?: TraceContext;
  /** Replaces the client's retry policy. */
  readonly retry?: Partial<RetryPolicy>;
}

export interface ResumeOptions extends CallOptions {
  /**
   * Time after a lost connection in which the stream reconnects, usually the request's
   * `resumeTimeout`. If it is above 0, leaving the loop early cancels the request. Default 0.
   */
  readonly resumeTimeoutMs?: number;
}

/** One connection to a server. All calls fail with PenstockError. */
export class Client {
  readonly #transport: Transport;
  readonly #timing: Timing;
  readonly #retry: RetryPolicy;
  readonly #budget = new RetryBudget();

  /**
   * `address` is HOST, HOST:PORT (the default port is 50051), [IPV6]:PORT or a gRPC target. Throws TypeError or RangeError, which names the
   * invalid value. Nothing is sent before the first call.
   */
  constructor(address: string, options: ClientOptions = {}) {
    this.#retry = retryPolicy(options.retry);
    this.#timing = options.timing ?? SYSTEM_TIMING;
    this.#transport = new Transport(address, options);
  }

  /**
   * Streams the events of one request. If it has a `resumeTimeout`, the stream reconnects by itself
   * after a lost connection.
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

  /** Streams the text of a request. Throws RangeError for a request with several outputs. */
  generateText(request: GenerateInit, options: CallOptions = {}): AsyncGenerator<string, void> {
    const n = request.sampling?.numOutputs ?? 1;
    if (n > 1)
      throw new RangeError(`sampling.num_outputs: a stream of text has one output, not ${n}`);
    return textOf(this.generate(request, options));
  }

  /** Returns a complete generation. Set a deadline, because nothing is returned before the end. */
  generateOnce(request: GenerateInit, options: CallOptions = {}): Promise<GenerateOnceResponse> {
    const message = create(GenerateOnceRequestSchema, { generation: request });
    return this.#unary(GenerationService.method.generateOnce, message, options);
  }

  /** Streams the remaining events of a request from `point` on, after its stream was lost. */
  resume(point: ResumePoint, options: ResumeOptions = {}): GenerationStream {
    const { resumeTimeoutMs = 0 } = options;
    const plan = {
      ...this.#plan(undefined, options),
      recovery: new Recovery(resumeTimeoutMs, this.#timing, point.nextSequence),
      point,
    };
    return this.#stream(undefined, plan, options);
  }

  /**
   * Cancels a request of the caller's tenant, regardless of the client that submitted it. Returns
   * its state before the cancellation.
   */
  async cancel(requestId: string, options: CallOptions = {}): Promise<RequestState> {
    const message = create(CancelRequestSchema, { requestId });
    return (await this.#control(GenerationService.method.cancel, message, options)).state;
  }

  /** Sends many requests over one call, with credit: for gateways. */
  multiplex(options: MultiplexOptions = {}): MultiplexSession {
    return new MultiplexSession(
      this.#transport,
      this.#timing,
      (begin, request, call) => [{ ...this.#source(call), begin }, this.#plan(request, call)],
      options,
    );
  }

  /** Returns the model with this name; the server's default model if the name is empty. */
  async getModel(name?: string, options: CallOptions = {}): Promise<ModelInfo> {
    const message = create(GetModelRequestSchema, name === undefined ? {} : { name });
    const { model } = await this.#control(ModelService.method.getModel, message, options);
    return present(model, "GetModelResponse.model");
  }

  /** Returns all models of the server. */
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

  /** Returns the token ids of a text or a conversation. */
  tokenize(
    request: MessageInitShape<typeof TokenizeRequestSchema>,
    options: CallOptions = {},
  ): Promise<TokenizeResponse> {
    const message = create(TokenizeRequestSchema, request);
    return this.#control(ModelService.method.tokenize, message, options);
  }

  /** Returns the text of token ids. */
  async detokenize(
    request: MessageInitShape<typeof DetokenizeRequestSchema>,
    options: CallOptions = {},
  ): Promise<string> {
    const message = create(DetokenizeRequestSchema, request);
    return (await this.#control(ModelService.method.detokenize, message, options)).text;
  }

  /**
   * Cancels open calls and closes the connection. Requests with a resumeTimeout can be resumed by
   * another client.
   */
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
        // If this fails, the request ends after its resumeTimeout.
        await this.cancel(requestId, leaving).catch(() => undefined);
      },
      isClosed: () => this.#transport.isClosed,
    };
  }

  #plan(request: GenerateRequest | undefined, options: CallOptions): StreamPlan {
    const resumeTimeout = request?.resumeTimeout;
    return {
      attempts: this.#attempts(options),
      recovery: new Recovery(resumeTimeout ? durationMs(resumeTimeout) : 0, this.#timing),
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
        if (signal?.aborted)
          throw callCancelled("the caller cancelled the call", "", signal.reason);
        if (this.#transport.isClosed) throw callCancelled("the client was closed", "", failed);
        const error = cancelledToUnavailable(errorFrom(failed));
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
      throw callCancelled("the caller cancelled the call", "", signal.reason ?? failed);
    }
  }
}

type StreamBeginning = (timeoutMs: number | undefined) => Promise<Attempt<GenerateResponse>>;

/** Adapts a Resume call to the stream that it continues. */
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
  if (value === undefined) throw new TypeError(`the response has no ${name}`);
  return value;
}
