/**
 * What a call may fail with. Owns the one error class. Does not know how a status travels: see
 * status.ts.
 */

import { status as Status } from "@grpc/grpc-js";
import type { ErrorReason } from "./generated/penstock/v1/error_pb.js";

/** `ErrorInfo.domain` of the reasons below. */
export const ERROR_DOMAIN = "penstock.dev";

/** Names of `ErrorReason`; servers that are newer than this client may send others. */
export type Reason = keyof typeof ErrorReason | "STREAM_BROKEN" | "" | (string & {});

/** One bad field: its path in the request message, e.g. "sampling.temperature". */
export interface FieldViolation {
  readonly field: string;
  readonly description: string;
}

/** What is known of a failed call; what is left out is empty. */
export interface Failure {
  readonly code: Status;
  readonly message: string;
  readonly reason?: Reason;
  readonly retryAfterMs?: number | undefined;
  readonly isRetryRefused?: boolean;
  readonly fieldViolations?: readonly FieldViolation[];
  readonly requestId?: string;
  readonly info?: Readonly<Record<string, string>>;
  readonly cause?: unknown;
}

/** A call failed. `code` and `reason` are for programs, `message` is for people. */
export class PenstockError extends Error {
  override readonly name = "PenstockError";
  /** The gRPC status. */
  readonly code: Status;
  /** E.g. "QUEUE_FULL"; "" when the status carried none (a proxy, the network, gRPC itself). */
  readonly reason: Reason;
  /** Milliseconds after which the server suggests to try again (RetryInfo, push-back). */
  readonly retryAfterMs: number | undefined;
  /** The server asked not to be tried again. */
  readonly isRetryRefused: boolean;
  /** The bad fields of an INVALID_ARGUMENT. */
  readonly fieldViolations: readonly FieldViolation[];
  /** The request, "" if it is not known. */
  readonly requestId: string;
  /** What ErrorInfo carried besides the reason; error.proto states which keys belong to it. */
  readonly info: Readonly<Record<string, string>>;
  readonly #text: string;

  constructor(failure: Failure) {
    const { code, reason = "", fieldViolations = [] } = failure;
    const told = reason === "" || reason === Status[code] ? "" : ` (${reason})`;
    const fields = fieldViolations
      .filter((bad) => !failure.message.includes(bad.field))
      .map((bad) => `; ${bad.field}: ${bad.description}`);
    super(`${Status[code]}${told}: ${failure.message}${fields.join("")}`, { cause: failure.cause });
    this.#text = failure.message;
    this.code = code;
    this.reason = reason;
    this.retryAfterMs = failure.retryAfterMs;
    this.isRetryRefused = failure.isRetryRefused ?? false;
    this.fieldViolations = fieldViolations;
    this.requestId = failure.requestId ?? "";
    this.info = failure.info ?? {};
  }

  /** Name of the gRPC status, e.g. "RESOURCE_EXHAUSTED". */
  get codeName(): string {
    return Status[this.code];
  }

  /** The same failure with another status, text or request. */
  with(changes: Partial<Failure>): PenstockError {
    return new PenstockError({ ...this, message: this.#text, cause: this.cause, ...changes });
  }
}

/** The stream broke the contract: a gap, a wrong order, or no `finished` at its end. */
export function streamBroken(message: string, requestId = ""): PenstockError {
  return new PenstockError({ code: Status.INTERNAL, reason: "STREAM_BROKEN", message, requestId });
}

/** This client gave the call up. */
export function callCancelled(message: string, requestId = "", cause?: unknown): PenstockError {
  return new PenstockError({ code: Status.CANCELLED, message, requestId, cause });
}

/** The call's deadline passed, by this client's clock. */
export function deadlinePassed(requestId = ""): PenstockError {
  const message = "the call's deadline passed";
  return new PenstockError({ code: Status.DEADLINE_EXCEEDED, message, requestId });
}

/** The server ended a Multiplex call well although requests were open. */
export function multiplexEnded(): PenstockError {
  const message = "the server ended the Multiplex call";
  return new PenstockError({ code: Status.UNAVAILABLE, message });
}

/** A request that would end the call it shares: gRPC refuses messages by their size. */
export function requestTooLarge(numBytes: number, maxBytes: number): PenstockError {
  const message = `the request has ${numBytes} bytes, and may have ${maxBytes}`;
  return new PenstockError({ code: Status.RESOURCE_EXHAUSTED, message });
}

/**
 * A call that a client else cancelled before the server stated anything was not served: servers
 * that
 * shut down do that with calls no handler has seen yet. A reason would state that it was meant.
 */
export function unlessAsked(error: PenstockError): PenstockError {
  if (error.code !== Status.CANCELLED || error.reason !== "") return error;
  const message = "the call was cancelled on its way, and not by this client";
  return error.with({ code: Status.UNAVAILABLE, message });
}
