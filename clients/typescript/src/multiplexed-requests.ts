/**
 * Many requests on one Multiplex call: keys, credit, and the routing of events to requests. Holds
 * the state of one call. Does no I/O and has no clock.
 */

import { create } from "@bufbuild/protobuf";
import type { PenstockError } from "./errors.js";
import { callCancelled, streamBroken } from "./errors.js";
import {
  MultiplexRequestSchema,
  type GenerateResponse,
  type MultiplexEvent,
  type MultiplexRequest,
  type MultiplexResponse,
} from "./generated/penstock/v1/generation_service_pb.js";
import { errorFromStatus } from "./status.js";

/** How much output of a request the server may send, and how credit is granted. */
export interface Credit {
  /** Output tokens that the server may send before they are taken from the stream. */
  readonly windowTokens: number;
  /** True if taking output grants no credit; only `grant` does. */
  readonly isManual: boolean;
}

/**
 * One request on a call: its messages that were received and not taken yet, its credit, its end.
 */
export class MultiplexedRequest implements AsyncIterable<GenerateResponse> {
  readonly key: bigint;
  readonly #credit: Credit;
  readonly #send: (command: MultiplexRequest) => void;
  readonly #responses: GenerateResponse[] = [];
  #wake: (() => void) | undefined;
  #failure: PenstockError | undefined;
  #numTakenTokens = 0;
  requestId = "";
  isEnded = false;

  constructor(key: bigint, credit: Credit, send: (command: MultiplexRequest) => void) {
    this.key = key;
    this.#credit = credit;
    this.#send = send;
  }

  /** Allows the server to send more output. */
  grant(numTokens: number): void {
    if (!this.isEnded) this.#send(creditCommand(this.key, numTokens));
  }

  /** Requests the server to end the request, which then ends with `finished`. */
  stop(): void {
    if (!this.isEnded) this.#send(cancelCommand(this.key));
  }

  put(response: GenerateResponse): void {
    if (response.event.case === "accepted") this.requestId = response.event.value.requestId;
    this.isEnded = response.event.case === "finished";
    this.#responses.push(response);
    this.#wake?.();
  }

  /** Ends with an error after the messages received so far; immediately if the error is urgent. */
  fail(error: PenstockError, isUrgent = false): void {
    this.#failure ??= error;
    this.isEnded = true;
    if (isUrgent) this.#responses.length = 0;
    this.#wake?.();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<GenerateResponse, void> {
    for (;;) {
      const response = this.#responses.shift();
      if (response) {
        this.#topUp(response);
        yield response;
      } else if (this.#failure) {
        throw this.#failure;
      } else if (this.isEnded) {
        return;
      } else {
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
        });
      }
    }
  }

  /** Grants credit for the tokens taken, when there are enough for a message. */
  #topUp(response: GenerateResponse): void {
    const { windowTokens, isManual } = this.#credit;
    if (isManual || response.event.case !== "tokens") return;
    this.#numTakenTokens += response.event.value.numTokens;
    if (this.#numTakenTokens >= Math.max(1, windowTokens >> 1)) {
      this.grant(this.#numTakenTokens);
      this.#numTakenTokens = 0;
    }
  }
}

/** All requests of one Multiplex call. */
export class MultiplexedRequests {
  readonly #requests = new Map<bigint, MultiplexedRequest>();
  readonly #left = new Set<bigint>();
  #nextKey = 1n;
  /** True if the server has reported that it accepts no more requests. */
  isDraining = false;
  hasEnded = false;

  get numOpen(): number {
    return this.#requests.size;
  }

  open(credit: Credit, send: (command: MultiplexRequest) => void): MultiplexedRequest {
    const request = new MultiplexedRequest(this.#nextKey, credit, send);
    this.#nextKey += 1n;
    this.#requests.set(request.key, request);
    return request;
  }

  /** Distributes the events of one message. Throws for a key that was not submitted. */
  receive(response: MultiplexResponse): void {
    for (const event of response.events) {
      const request = this.#requests.get(event.key);
      if (!request) this.#receiveLate(event);
      else if (event.outcome.case === "response") {
        request.put(event.outcome.value);
        if (request.isEnded) this.#requests.delete(event.key);
      } else if (event.outcome.case === "error") {
        this.#requests.delete(event.key);
        const error = errorFromStatus(event.outcome.value, request.requestId);
        this.isDraining ||= error.reason === "DRAINING";
        request.fail(error);
      }
    }
  }

  /** Abandons this request. Returns whether it must be cancelled on the server. */
  leave(request: MultiplexedRequest, error: PenstockError): boolean {
    if (!this.#requests.delete(request.key)) return false;
    this.#left.add(request.key);
    request.fail(error, true);
    return true;
  }

  /** Removes a request that was never sent. */
  forget(request: MultiplexedRequest): void {
    this.#requests.delete(request.key);
  }

  /** Ends the call. Open requests fail, each with its request id. */
  end(error: PenstockError): void {
    this.hasEnded = true;
    const requests = [...this.#requests.values()];
    this.#requests.clear();
    for (const request of requests) request.fail(error.with({ requestId: request.requestId }));
  }

  /** Handles an event of an abandoned request; removes its entry when it ends. */
  #receiveLate({ key, outcome }: MultiplexEvent): void {
    if (!this.#left.has(key)) throw streamBroken(`an event of request ${key}, which is not open`);
    const isFinished = outcome.case === "response" && outcome.value.event.case === "finished";
    if (isFinished || outcome.case === "error") this.#left.delete(key);
  }
}

export function cancelCommand(key: bigint): MultiplexRequest {
  return create(MultiplexRequestSchema, { command: { case: "cancel", value: { key } } });
}

export function requestCancelled(requestId: string): PenstockError {
  return callCancelled("the client cancelled the request", requestId);
}

function creditCommand(key: bigint, numCreditTokens: number): MultiplexRequest {
  if (!(Number.isInteger(numCreditTokens) && numCreditTokens >= 1)) {
    throw new RangeError(`numTokens: must be an integer of at least 1, not ${numCreditTokens}`);
  }
  return create(MultiplexRequestSchema, {
    command: { case: "credit", value: { key, numCreditTokens } },
  });
}
