/** The error class of failed calls. status.ts reads it from the status of a call. */

import { status as Status } from "@grpc/grpc-js";
import type { ErrorReason } from "./generated/penstock/v1/error_pb.js";

/** `ErrorInfo.domain` of the reasons below. */
export const ERROR_DOMAIN = "penstock.dev";

/** Names of `ErrorReason`. Newer servers may send others. */
export type Reason = keyof typeof ErrorReason | "STREAM_BROKEN" | "" | (string & {});

/** One invalid field: its path in the request message, e.g. "sampling.temperature". */
export interface FieldViolation {
  readonly field: string;
  readonly description: string;
}

/** The details of a failed call. Fields that are not set are empty. */
export interface Failure {
  readonly code: Status;
  readonly message: string;
  readonly reason?: Reason;
  readonly retryAfterMs?: number | undefined;
  readonly isRetryForbidden?: boolean;
  readonly fieldViolations?: readonly FieldViolation[];
  readonly requestId?: string;
  readonly info?: Readonly<Record<string, string>>;
  readonly cause?: unknown;
}

/** A call failed. `code` and `reason` are for programs, `message` is for humans. */
export class PenstockError extends Error {
  override readonly name = "PenstockError";
  /** The gRPC status. */
  readonly code: Status;
  /**
   * E.g. "QUEUE_FULL"; "" if the status has none, because a proxy, the network or gRPC caused it.
   */
  readonly reason: Reason;
  /** Milliseconds after which the server suggests a retry (RetryInfo, push-back). */
  readonly retryAfterMs: number | undefined;
  /** True if the server requested that the call is not retried. */
  readonly isRetryForbidden: boolean;
  /** The invalid fields, for INVALID_ARGUMENT. */
  readonly fieldViolations: readonly FieldViolation[];
  /** The id of the request; "" if unknown. */
  readonly requestId: string;
  /** Other values of ErrorInfo; error.proto defines the keys for each reason. */
  readonly info: Readonly<Record<string, string>>;
  readonly #text: string;

  constructor(failure: Failure) {
    const { code, reason = "", fieldViolations = [] } = failure;
    const detail = reason === "" || reason === Status[code] ? "" : ` (${reason})`;
    const { message, info } = failure;
    // The message has only the first field.
    const text = fieldViolations.length > 0 ? message.replace(/ \(and \d+ more\)$/, "") : message;
    const fields = fieldViolations
      .map((bad) => `${bad.field}: ${bad.description}`)
      .filter((line) => !text.includes(line));
    const numMore = info?.["num_more_violations"];
    if (numMore !== undefined) fields.push(`and ${numMore} more`);
    super([`${Status[code]}${detail}: ${text}`, ...fields].join("; "), { cause: failure.cause });
    this.#text = failure.message;
    this.code = code;
    this.reason = reason;
    this.retryAfterMs = failure.retryAfterMs;
    this.isRetryForbidden = failure.isRetryForbidden ?? false;
    this.fieldViolations = fieldViolations;
    this.requestId = failure.requestId ?? "";
    this.info = failure.info ?? {};
  }

  /** Name of the gRPC status, e.g. "RESOURCE_EXHAUSTED". */
  get codeName(): string {
    return Status[this.code];
  }

  /** Returns the same failure with another status, message or request id. */
  with(changes: Partial<Failure>): PenstockError {
    return new PenstockError({ ...this, message: this.#text, cause: this.cause, ...changes });
  }
}

/** The stream violated the protocol: a gap, a wrong order, or no `finished` event at its end. */
export function streamBroken(message: string, requestId = ""): PenstockError {
  return new PenstockError({ code: Status.DATA_LOSS, reason: "STREAM_BROKEN", message, requestId });
}

/** This client cancelled the call. */
export function callCancelled(message: string, requestId = "", cause?: unknown): PenstockError {
  return new PenstockError({ code: Status.CANCELLED, message, requestId, cause });
}

/** The deadline of the call passed, by the clock of this client. */
export function deadlinePassed(requestId = ""): PenstockError {
  const message = "the call's deadline passed";
  return new PenstockError({ code: Status.DEADLINE_EXCEEDED, message, requestId });
}

/** The server ended a Multiplex call with OK although requests were open. */
export function multiplexEnded(): PenstockError {
  const message = "the server ended the Multiplex call";
  return new PenstockError({ code: Status.UNAVAILABLE, message });
}

/** A request that is too large, so gRPC would reject it and end the shared call. */
export function requestTooLarge(numBytes: number, maxBytes: number): PenstockError {
  const message = `the request has ${numBytes} bytes; the limit is ${maxBytes}`;
  return new PenstockError({ code: Status.RESOURCE_EXHAUSTED, message });
}

/**
 * Converts the error of a call that was cancelled before the server responded, and not by this
 * client, to UNAVAILABLE. A server that shuts down cancels calls that have no handler yet. An error
 * with a reason was sent deliberately and is not converted.
 */
export function cancelledToUnavailable(error: PenstockError): PenstockError {
  if (error.code !== Status.CANCELLED || error.reason !== "") return error;
  const message = "the server or a proxy cancelled the call, not this client";
  return error.with({ code: Status.UNAVAILABLE, message });
}
