/** The trace to which a request belongs: W3C trace context in the metadata of a call. */

import { Metadata } from "@grpc/grpc-js";
import { setHeader } from "./headers.js";

/** The headers of https://www.w3.org/TR/trace-context/. */
export interface TraceContext {
  readonly traceparent: string;
  readonly tracestate?: string | undefined;
}

/** Adds the headers. Throws TypeError for an invalid header; the server checks the content. */
export function addTrace(metadata: Metadata, trace: TraceContext | undefined): void {
  if (!trace) return;
  setHeader(metadata, "traceparent", trace.traceparent, "trace.traceparent");
  if (trace.tracestate) setHeader(metadata, "tracestate", trace.tracestate, "trace.tracestate");
}

/** Returns a copy of the trace. Throws TypeError like `addTrace`. */
export function checkedTrace(trace: TraceContext | undefined): TraceContext | undefined {
  addTrace(new Metadata(), trace);
  return trace;
}
