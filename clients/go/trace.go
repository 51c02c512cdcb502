package penstock

import (
	"context"
	"crypto/rand"
	"encoding/hex"

	"google.golang.org/grpc/metadata"
)

// TraceIDHeader is the trailing metadata in which a refused call has its trace id.
const TraceIDHeader = "x-trace-id"

const (
	traceparentKey = "traceparent"
	tracestateKey  = "tracestate"
)

// TraceContext places a call in a distributed trace: the headers of W3C Trace Context, "" for none.
type TraceContext struct {
	Traceparent string
	Tracestate  string
}

// NewTraceContext begins a trace that is to be recorded, for programs without a tracer.
func NewTraceContext() TraceContext {
	var ids [24]byte
	if _, err := rand.Read(ids[:]); err != nil {
		panic(err) // the system has no randomness
	}
	trace, span := hex.EncodeToString(ids[:16]), hex.EncodeToString(ids[16:])
	return TraceContext{Traceparent: "00-" + trace + "-" + span + "-01"}
}

type traceContextKey struct{}

// ContextWithTrace makes calls with the context it answers part of a trace. Metadata of the call
// itself, or a tracing interceptor's, goes before it.
func ContextWithTrace(ctx context.Context, trace TraceContext) context.Context {
	return context.WithValue(ctx, traceContextKey{}, trace)
}

// withTraceMetadata puts the trace into the metadata of a call, unless it is there already.
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

// traceparentOf is the traceparent that a call with ctx carries, "" for none.
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
