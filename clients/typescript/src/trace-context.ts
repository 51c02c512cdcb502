/** Where a request belongs in a distributed trace: W3C trace context in the metadata of a call. */

import { Metadata } from "@grpc/grpc-js";
import { setHeader } from "./headers.js";

/** The headers of https://www.w3.org/TR/trace-context/, as they are sent. */
export interface TraceContext {
  readonly traceparent: string;
  readonly tracestate?: string | undefined;
}

/** Throws TypeError for what cannot be a header; what it states is the server's to judge. */
export function addTrace(metadata: Metadata, trace: TraceContext | undefined): void {
  if (!trace) return;
  setHeader(metadata, "traceparent", trace.traceparent, "trace.traceparent");
  if (trace.tracestate) setHeader(metadata, "tracestate", trace.tracestate, "trace.tracestate");
}

/** The same trace. Throws TypeError as `addTrace`, also where it will not be a header. */
export function checkedTrace(trace: TraceContext | undefined): TraceContext | undefined {
  addTrace(new Metadata(), trace);
  return trace;
}
