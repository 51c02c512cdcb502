package penstock

import (
	"context"
	"crypto/rand"
	"encoding/hex"

	"google.golang.org/grpc/metadata"
)

// TraceIDHeader is the trailer with the trace id of a rejected call.
const TraceIDHeader = "x-trace-id"

const (
	traceparentKey = "traceparent"
	tracestateKey  = "tracestate"
)

// TraceContext is the trace to which a call belongs: the headers of W3C Trace Context, "" for none.
type TraceContext struct {
	Traceparent string
	Tracestate  string
}

// NewTraceContext starts a trace that is sampled, for programs without a tracer.
func NewTraceContext() TraceContext {
	var ids [24]byte
	if _, err := rand.Read(ids[:]); err != nil {
		panic(err) // the system's random generator failed
	}
	trace, span := hex.EncodeToString(ids[:16]), hex.EncodeToString(ids[16:])
	return TraceContext{Traceparent: "00-" + trace + "-" + span + "-01"}
}

type traceContextKey struct{}

// ContextWithTrace returns a context whose calls belong to the trace. Metadata of the call, or of a
// tracing interceptor, takes precedence.
func ContextWithTrace(ctx context.Context, trace TraceContext) context.Context {
	return context.WithValue(ctx, traceContextKey{}, trace)
}

// withTraceMetadata adds the trace context to the metadata of a call, unless it has one already.
func withTraceMetadata(ctx context.Context) context.Context {
	trace, ok := ctx.Value(traceContextKey{}).(TraceContext)
	if !ok || trace.Traceparent == "" || sentTraceparent(ctx) != "" {
		return ctx
	}
	ctx = metadata.AppendToOutgoingContext(ctx, traceparentKey, trace.Traceparent)
	if trace.Tracestate != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, tracestateKey, trace.Tracestate)
	}
	return ctx
}

// traceparentOf returns the traceparent of calls with ctx, "" for none.
func traceparentOf(ctx context.Context) string {
	return sentTraceparent(withTraceMetadata(ctx))
}

func sentTraceparent(ctx context.Context) string {
	sent, _ := metadata.FromOutgoingContext(ctx)
	if values := sent.Get(traceparentKey); len(values) > 0 {
		return values[0]
	}
	return ""
}
