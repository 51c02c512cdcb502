package penstock

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "penstock/v1"
)

// MultiplexConfig defines how requests share a call.
type MultiplexConfig struct {
	// WindowTokens is the number of output tokens of a request that the server may send before they
	// are read from its Stream; at least twice min_chunk_tokens. It limits the memory for a slow
	// reader, and should exceed the number of tokens generated in one round trip.
	WindowTokens uint32
	// MaxCallAge is the time after which new requests use a new call. The old call ends with its
	// last request. It ensures that no call exceeds the maximum connection age of the server, by
	// default about 30 minutes.
	MaxCallAge time.Duration
	// MaxRequestBytes is the maximum size of a request. A larger request fails and is not sent,
	// because it would end the call for all requests. At most the server's
	// ModelLimits.max_message_bytes.
	MaxRequestBytes int
}

// DefaultMultiplex returns a window of 256 tokens, a call age of 20 minutes and requests of up to
// 4 MiB.
func DefaultMultiplex() MultiplexConfig {
	return MultiplexConfig{
		WindowTokens: 256, MaxCallAge: 20 * time.Minute, MaxRequestBytes: 4 << 20,
	}
}

func (c MultiplexConfig) check() error {
	switch {
	case c.WindowTokens < 1 || c.WindowTokens > 1<<20:
		return fmt.Errorf("penstock: WindowTokens: must be from 1 to %d, not %d",
			1<<20, c.WindowTokens)
	case c.MaxCallAge <= 0:
		return fmt.Errorf("penstock: MaxCallAge: must be positive, not %v", c.MaxCallAge)
	case c.MaxRequestBytes < 1 || c.MaxRequestBytes > maxMessageBytes:
		return fmt.Errorf("penstock: MaxRequestBytes: must be from 1 to %d, not %d",
			maxMessageBytes, c.MaxRequestBytes)
	}
	return nil
}

// Multiplex sends many requests over one call. It opens another call if the current one is lost or
// too old, or if the server is about to stop. It assigns the keys. Goroutines may share one.
type Multiplex struct {
	client *Client
	config MultiplexConfig
	ctx    context.Context
	cancel context.CancelFunc
	// Protects the current call. A goroutine that has read it may find it replaced.
	current chan *multiplexCall
}

// Multiplex creates a Multiplex. Its calls send the metadata of ctx and end with ctx. The first
// call is opened with the first request.
func (c *Client) Multiplex(ctx context.Context, config MultiplexConfig) (*Multiplex, error) {
	if err := config.check(); err != nil {
		return nil, err
	}
	m := &Multiplex{client: c, config: config, current: make(chan *multiplexCall, 1)}
	m.ctx, m.cancel = context.WithCancel(ctx)
	m.current <- nil
	return m, nil
}

// Close ends all calls and all open requests with codes.Canceled. It returns nil; it implements
// io.Closer.
func (m *Multiplex) Close() error {
	m.cancel()
	return nil
}

// Generate is like Client.Generate, over the shared call. The deadline of ctx is sent as
// total_timeout; of its metadata only traceparent is sent. Reading the Stream grants credit for
// more output, so a request that is not read does not block the others.
func (m *Multiplex) Generate(ctx context.Context, request *pb.GenerateRequest) *Stream {
	window := m.config.WindowTokens
	if chunk := request.GetOutput().GetMinChunkTokens(); 2*chunk > window {
		window = 2 * chunk
	}
	return newStream(ctx, m.client, request, func(ctx context.Context) (source, error) {
		return m.submit(ctx, request, window, window/2+1)
	})
}

// GenerateWithCredit leaves the credit to the caller: the server sends numTokens tokens, and more
// only after Stream.Grant. A request without credit for too long fails with READER_STALLED.
func (m *Multiplex) GenerateWithCredit(
	ctx context.Context, request *pb.GenerateRequest, numTokens uint32,
) *Stream {
	return newStream(ctx, m.client, request, func(ctx context.Context) (source, error) {
		return m.submit(ctx, request, numTokens, 0)
	})
}

// Grant allows the server to send more tokens of a request started by Multiplex.GenerateWithCredit.
// Any goroutine may call it.
func (s *Stream) Grant(ctx context.Context, numTokens uint32) error {
	s.mu.Lock()
	multiplexed, ok := s.source.(*multiplexedSource)
	s.mu.Unlock()
	if !ok || multiplexed.topUp != 0 {
		return &Error{
			Code:    codes.FailedPrecondition,
			Message: "the stream was not started by GenerateWithCredit, or was resumed without credit",
		}
	}
	if numTokens == 0 {
		return &Error{Code: codes.InvalidArgument, Message: "numTokens: must be at least 1"}
	}
	return multiplexed.grant(ctx, numTokens)
}

// submit starts a request, on a new call if the current call does not accept it. topUp is the
// number of tokens that are taken before credit is granted for them; 0 leaves the credit to the
// caller.
func (m *Multiplex) submit(
	ctx context.Context, request *pb.GenerateRequest, credit, topUp uint32,
) (source, error) {
	submit := &pb.MultiplexSubmit{
		Generation: withDeadline(ctx, request), NumCreditTokens: &credit,
	}
	if traceparent := traceparentOf(ctx); traceparent != "" {
		submit.Traceparent = &traceparent
	}
	// A request that cannot be encoded would end the call for all requests.
	encoded, err := proto.Marshal(submit)
	if err != nil {
		return nil, encodingErrorOf(submit, err)
	}
	if size := len(encoded) + commandBytes; size > m.config.MaxRequestBytes {
		return nil, &Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf(
			"the request has %d bytes; the limit is %d", size, m.config.MaxRequestBytes)}
	}
	var call *multiplexCall
	select {
	case call = <-m.current:
	case <-ctx.Done():
		return nil, contextEnded(ctx.Err())
	}
	multiplexed, err := call.join(topUp)
	if multiplexed == nil {
		call.retire()
		call = m.newCall()
		multiplexed, err = call.join(topUp)
	}
	m.current <- call
	if multiplexed == nil {
		return nil, err
	}
	submit.Key = multiplexed.key
	err = call.send(ctx, &pb.MultiplexRequest{
		Command: &pb.MultiplexRequest_Submit{Submit: submit},
	})
	if err != nil {
		call.forget(multiplexed)
		return nil, err
	}
	go multiplexed.watch(ctx)
	return &multiplexedSource{multiplexedRequest: multiplexed, ctx: ctx}, nil
}

// Maximum size that the key and the tags add to a request.
const commandBytes = 32

// withDeadline returns the request with the deadline of ctx as its total_timeout, unless its own is
// earlier.
func withDeadline(ctx context.Context, request *pb.GenerateRequest) *pb.GenerateRequest {
	deadline, ok := ctx.Deadline()
	if !ok {
		return request
	}
	left := time.Until(deadline)
	if left <= 0 {
		left = 1 // must be positive; ctx is about to end
	}
	if own := request.GetScheduling().GetTotalTimeout(); own != nil && own.AsDuration() <= left {
		return request
	}
	limited := proto.Clone(request).(*pb.GenerateRequest)
	if limited.Scheduling == nil {
		limited.Scheduling = &pb.SchedulingOptions{}
	}
	limited.Scheduling.TotalTimeout = durationpb.New(left)
	return limited
}
