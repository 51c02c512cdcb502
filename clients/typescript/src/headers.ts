/**
 * Headers of a call, as gRPC sends them. Owns the refusal of what cannot be one, by its name and
 * before anything is sent. Does not know whose they are.
 */

import { Metadata } from "@grpc/grpc-js";

/** Metadata of a call, texts by key. */
export type Headers = Readonly<Record<string, string>>;

/**
 * Throws TypeError naming `field` for a header that gRPC does not take. Its value is not reported:
 * it
 * may be secret.
 */
export function setHeader(metadata: Metadata, key: string, value: string, field: string): void {
  try {
    if (value === undefined || value === null) throw new TypeError("there is none");
    metadata.set(key, value);
  } catch {
    throw new TypeError(`${field}: cannot be a header: it must be one line of printable ASCII`);
  }
}

/** Throws TypeError naming the header that gRPC does not take. */
export function setHeaders(metadata: Metadata, headers: Headers): void {
  for (const [key, value] of Object.entries(headers)) {
    setHeader(metadata, key, value, `metadata.${key}`);
  }
}
