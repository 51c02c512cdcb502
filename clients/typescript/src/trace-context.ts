/** Where a request belongs in a distributed trace: W3C trace context in the metadata of a call. */

import type { Metadata } from "@grpc/grpc-js";

/** The headers of https://www.w3.org/TR/trace-context/, as they are sent. */
export interface TraceContext {
  readonly traceparent: string;
  readonly tracestate?: string | undefined;
}

export function addTrace(metadata: Metadata, trace: TraceContext | undefined): void {
  if (!trace) return;
  metadata.set("traceparent", trace.traceparent);
  if (trace.tracestate) metadata.set("tracestate", trace.tracestate);
}
