/** Headers of a call. Rejects invalid headers before anything is sent; errors name the header. */

import { Metadata } from "@grpc/grpc-js";

/** Metadata of a call: texts by key. */
export type Headers = Readonly<Record<string, string>>;

/**
 * Throws TypeError, which names `field`, for a header that gRPC does not accept. The value is not
 * quoted, because it may be secret.
 */
export function setHeader(metadata: Metadata, key: string, value: string, field: string): void {
  try {
    if (value === undefined || value === null) throw new TypeError("there is none");
    metadata.set(key, value);
  } catch {
    throw new TypeError(`${field}: cannot be a header: it must be one line of printable ASCII`);
  }
}

/** Throws TypeError, which names the header, for a header that gRPC does not accept. */
export function setHeaders(metadata: Metadata, headers: Headers): void {
  for (const [key, value] of Object.entries(headers)) {
    setHeader(metadata, key, value, `metadata.${key}`);
  }
}
