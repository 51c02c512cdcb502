/**
 * Converts the status, google.rpc details and push-back of a failed call to a PenstockError. Reads
 * the trailers of a call, and a Status inside a Multiplex message.
 */

import { fromBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { durationMs, type Any } from "@bufbuild/protobuf/wkt";
import { Metadata, status as Codes, type ServiceError } from "@grpc/grpc-js";
import { ERROR_DOMAIN, PenstockError, type Failure } from "./errors.js";
import { StatusSchema, type Status } from "./generated/google/rpc/status_pb.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RequestInfoSchema,
  RetryInfoSchema,
} from "./generated/google/rpc/error_details_pb.js";

const DETAILS_KEY = "grpc-status-details-bin";
const PUSHBACK_KEY = "grpc-retry-pushback-ms";

type Found = { -readonly [key in keyof Failure]?: Failure[key] };

/**
 * Returns the typed error of a failed call. Throws `failed` itself if it is not the failure of a
 * call.
 */
export function errorFrom(failed: unknown, requestId = ""): PenstockError {
  if (failed instanceof PenstockError) return failed;
  if (!isServiceError(failed)) throw failed;
  const found: Found = {};
  for (const value of failed.metadata.get(DETAILS_KEY)) {
    const status = typeof value === "string" ? undefined : read(StatusSchema, value);
    if (status) readDetails(status.details, found);
  }
  const pushback = failed.metadata.get(PUSHBACK_KEY).at(-1);
  if (pushback !== undefined) readPushback(pushback.toString(), found);
  return make(failed.code, failed.details, found, requestId, failed);
}

/** Returns the typed error of a request that failed on a Multiplex call. */
export function errorFromStatus(status: Status, requestId = ""): PenstockError {
  const found: Found = {};
  readDetails(status.details, found);
  const isKnown = status.code in Codes && status.code !== Codes.OK;
  return make(isKnown ? status.code : Codes.UNKNOWN, status.message, found, requestId);
}

function make(
  code: Codes,
  message: string,
  found: Found,
  requestId: string,
  cause?: unknown,
): PenstockError {
  return new PenstockError({
    ...found,
    code,
    message,
    requestId: found.requestId || requestId,
    cause,
  });
}

function isServiceError(failed: unknown): failed is ServiceError {
  return (
    failed instanceof Error &&
    "code" in failed &&
    "details" in failed &&
    "metadata" in failed &&
    failed.metadata instanceof Metadata
  );
}

/**
 * Push-back of gRFC A6 in milliseconds. A negative or invalid value means that the call must not be
 * retried.
 */
function readPushback(value: string, found: Found): void {
  const pushbackMs = /^\d+$/.test(value) ? Number(value) : -1;
  if (pushbackMs < 0) found.isRetryForbidden = true;
  else found.retryAfterMs = Math.max(found.retryAfterMs ?? 0, pushbackMs);
}

function readDetails(details: readonly Any[], found: Found): void {
  for (const detail of details) {
    const info = unpack(ErrorInfoSchema, detail);
    if (info?.domain === ERROR_DOMAIN) {
      found.reason = info.reason;
      found.info = info.metadata;
    }
    const retry = unpack(RetryInfoSchema, detail);
    if (retry?.retryDelay) found.retryAfterMs = Math.max(0, durationMs(retry.retryDelay));
    const badRequest = unpack(BadRequestSchema, detail);
    if (badRequest) {
      found.fieldViolations = badRequest.fieldViolations.map(({ field, description }) => ({
        field,
        description,
      }));
    }
    const request = unpack(RequestInfoSchema, detail);
    if (request) found.requestId = request.requestId;
  }
}

function unpack<D extends DescMessage>(schema: D, detail: Any): MessageShape<D> | undefined {
  const name = detail.typeUrl.slice(detail.typeUrl.lastIndexOf("/") + 1);
  return name === schema.typeName ? read(schema, detail.value) : undefined;
}

/** Ignores details that cannot be parsed, so that they do not hide the status. */
function read<D extends DescMessage>(schema: D, bytes: Uint8Array): MessageShape<D> | undefined {
  try {
    return fromBinary(schema, bytes);
  } catch {
    return undefined;
  }
}
