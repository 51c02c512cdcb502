/**
 * Requests over the Multiplex calls of one client: the current call, and older calls with open
 * requests. Owns the calls, their writes and the requests' timers. multiplexed-requests.ts routes
 * events to requests and decides when credit is granted.
 */

import { clone, create } from "@bufbuild/protobuf";
import { durationFromMs, durationMs } from "@bufbuild/protobuf/wkt";
import { status as Codes, type ClientDuplexStream, type Metadata } from "@grpc/grpc-js";
import { encode } from "./encoding.js";
import {
  cancelledToUnavailable,
  deadlinePassed,
  multiplexEnded,
  requestTooLarge,
  type PenstockError,
} from "./errors.js";
import {
  GenerateRequestSchema,
  GenerationService,
  MultiplexRequestSchema,
  type GenerateRequest,
  type GenerateResponse,
  type MultiplexRequest,
  type MultiplexResponse,
} from "./generated/penstock/v1/generation_service_pb.js";
import { SchedulingOptionsSchema } from "./generated/penstock/v1/options_pb.js";
import {
  cancelCommand,
  MultiplexedRequests,
  requestCancelled,
  type Credit,
  type MultiplexedRequest,
} from "./multiplexed-requests.js";
import { errorFrom } from "./status.js";
import type { Timing } from "./timing.js";
import type { Attempt, CallContext, Transport } from "./transport.js";

const MAX_TIMER_MS = 0x7fff_ffff;

/** How requests share calls. */
export interface MultiplexOptions {
  /** Output tokens that the server may send before they are read. Default 256. */
  readonly windowTokens?: number;
  /**
   * After this time new requests use a new call, and the old call ends with its last request, so
   * that no call exceeds the server's maximum connection age, by default about 1800 s. Default
   * 1,200,000.
   */
  readonly maxCallAgeMs?: number;
  /**
   * A larger request fails and is not sent, because it would end the call for all. Default 4 MiB.
   */
  readonly maxRequestBytes?: number;
}

/** One request to start. */
export interface Submission {
  readonly request: GenerateRequest;
  readonly credit: Credit;
  readonly context: CallContext;
  readonly timeoutMs: number | undefined;
}

export class Multiplexer {
  readonly #transport: Transport;
  readonly #timing: Timing;
  readonly #maxCallAgeMs: number;
  readonly #maxRequestBytes: number;
  #calls: MultiplexCall[] = [];

  constructor(transport: Transport, timing: Timing, options: MultiplexOptions) {
    this.#transport = transport;
    this.#timing = timing;
    this.#maxCallAgeMs = options.maxCallAgeMs ?? 1_200_000;
    this.#maxRequestBytes = options.maxRequestBytes ?? 4 << 20;
  }

  /** Starts a request, on a new call if the current call does not accept it. */
  async open(submission: Submission): Promise<MultiplexAttempt> {
    if (submission.timeoutMs !== undefined && submission.timeoutMs <= 0) throw deadlinePassed();
    let call = this.#usable();
    if (!call) {
      const metadata = await this.#transport.sharedMetadata();
      // Another request may have opened a call meanwhile.
      call = this.#usable() ?? this.#begin(metadata);
    }
    const traceparent = this.#transport.traceOf(submission.context)?.traceparent;
    return call.submit(submission, traceparent, this.#maxRequestBytes);
  }

  /** Accepts no more requests. Each call ends with its last request. */
  close(): void {
    for (const call of this.#calls) call.retire();
  }

  #usable(): MultiplexCall | undefined {
    this.#calls = this.#calls.filter((call) => !call.requests.hasEnded);
    const nowMs = this.#timing.nowMs();
    for (const call of this.#calls) {
      if (call.canSubmit(nowMs)) return call;
      call.retire();
    }
    return undefined;
  }

  #begin(metadata: Metadata): MultiplexCall {
    const duplex = this.#transport.duplex(GenerationService.method.multiplex, metadata);
    const call = new MultiplexCall(duplex, this.#timing.nowMs() + this.#maxCallAgeMs);
    this.#calls.push(call);
    return call;
  }
}

/** One Multiplex call. */
class MultiplexCall {
  readonly requests = new MultiplexedRequests();
  readonly #call: ClientDuplexStream<Buffer, MultiplexResponse>;
  readonly #expiresMs: number;
  #isRetired = false;
  #isHalfClosed = false;
  headers: Metadata | undefined;

  constructor(call: ClientDuplexStream<Buffer, MultiplexResponse>, expiresMs: number) {
    this.#call = call;
    this.#expiresMs = expiresMs;
    call.on("metadata", (metadata) => {
      this.headers = metadata;
    });
    call.on("data", (response: MultiplexResponse) => this.#receive(response));
    call.on("error", (error) => this.requests.end(multiplexError(errorFrom(error))));
    call.on("end", () => this.requests.end(multiplexEnded()));
  }

  canSubmit(nowMs: number): boolean {
    return !(
      this.#isRetired ||
      this.requests.hasEnded ||
      this.requests.isDraining ||
      nowMs >= this.#expiresMs
    );
  }

  /** Throws PenstockError for a request that is too large, without effect on others. */
  submit(
    submission: Submission,
    traceparent: string | undefined,
    maxBytes: number,
  ): MultiplexAttempt {
    const { credit, timeoutMs } = submission;
    const request = this.requests.open(credit, (command) => this.send(command));
    const command = create(MultiplexRequestSchema, {
      command: {
        case: "submit",
        value: {
          key: request.key,
          generation: limitDeadline(submission.request, timeoutMs),
          numCreditTokens: credit.windowTokens,
          ...(traceparent === undefined ? {} : { traceparent }),
        },
      },
    });
    try {
      this.#write(command, maxBytes);
    } catch (error) {
      this.requests.forget(request);
      throw error;
    }
    return new MultiplexAttempt(this, request, timeoutMs);
  }

  send(command: MultiplexRequest): void {
    if (!this.requests.hasEnded) this.#write(command, Infinity);
  }

  /** Abandons a request. */
  leave(request: MultiplexedRequest, error: PenstockError): void {
    if (this.requests.leave(request, error)) this.send(cancelCommand(request.key));
    this.#endWhenUnused();
  }

  /** Ends the call with its last request. */
  retire(): void {
    this.#isRetired = true;
    this.#endWhenUnused();
  }

  #write(command: MultiplexRequest, maxBytes: number): void {
    const bytes = encode(MultiplexRequestSchema, command);
    if (bytes.length > maxBytes) throw requestTooLarge(bytes.length, maxBytes);
    this.#call.write(bytes);
  }

  #receive(response: MultiplexResponse): void {
    try {
      this.requests.receive(response);
    } catch (broken) {
      this.requests.end(errorFrom(broken));
      this.#call.cancel();
    }
    this.#endWhenUnused();
  }

  #endWhenUnused(): void {
    if (!this.#isRetired || this.requests.numOpen > 0 || this.requests.hasEnded) return;
    if (this.#isHalfClosed) return;
    this.#isHalfClosed = true;
    this.#call.end();
  }
}

/** One request on a call, with the interface of a separate call. */
export class MultiplexAttempt implements Attempt<GenerateResponse> {
  readonly #call: MultiplexCall;
  readonly #timer: NodeJS.Timeout | undefined;
  readonly request: MultiplexedRequest;

  constructor(call: MultiplexCall, request: MultiplexedRequest, timeoutMs: number | undefined) {
    this.#call = call;
    this.request = request;
    // Node fires timers immediately if their delay is too long for its counter. In that case only
    // the server enforces total_timeout.
    if (timeoutMs !== undefined && timeoutMs <= MAX_TIMER_MS) {
      const expire = (): void => call.leave(request, deadlinePassed(request.requestId));
      this.#timer = setTimeout(expire, timeoutMs);
    }
  }

  get responses(): AsyncIterable<GenerateResponse> {
    return this.request;
  }

  get headers(): Metadata | undefined {
    return this.#call.headers;
  }

  cancel(): void {
    clearTimeout(this.#timer);
    this.#call.leave(this.request, requestCancelled(this.request.requestId));
  }
}

/** Returns the request with `timeoutMs` as its total_timeout, unless its own is earlier. */
function limitDeadline(request: GenerateRequest, timeoutMs: number | undefined): GenerateRequest {
  if (timeoutMs === undefined) return request;
  const own = request.scheduling?.totalTimeout;
  if (own && durationMs(own) <= timeoutMs) return request;
  const limited = clone(GenerateRequestSchema, request);
  limited.scheduling ??= create(SchedulingOptionsSchema);
  limited.scheduling.totalTimeout = durationFromMs(Math.max(1, Math.floor(timeoutMs)));
  return limited;
}

/** Converts the failure of a Multiplex call to that of its requests. */
function multiplexError(error: PenstockError): PenstockError {
  if (error.code === Codes.UNIMPLEMENTED && error.reason === "") {
    return error.with({ message: "the server does not offer Multiplex" });
  }
  return cancelledToUnavailable(error);
}
