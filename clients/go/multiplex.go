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

// MultiplexConfig states how requests share a call.
type MultiplexConfig struct {
	// WindowTokens is how many output tokens of a request the server may send beyond what was read
	// from its Stream; twice min_chunk_tokens where that is more. It bounds what a slow reader holds
	// in memory, and should exceed what is generated in one round trip.
	WindowTokens uint32
	// MaxCallAge is after how long new requests go to a new call; the old one ends with its last
	// request, so that no call outlives its connection, to which servers give 30 minutes.
	MaxCallAge time.Duration
	// MaxRequestBytes fails a larger request by itself: sent, it would end the call, and every
	// request on it. Not more than the server's ModelLimits.max_message_bytes.
	MaxRequestBytes int
}

// DefaultMultiplex is 256 tokens, 20 minutes, 4 MiB.
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

// Multiplex sends many requests over one call, and opens another when that is lost, grows old, or
// the server is about to stop. Keys are its own business. Goroutines may share one.
type Multiplex struct {
	client *Client
	config MultiplexConfig
	ctx    context.Context
	cancel context.CancelFunc
	// Holds the current call; a caller that has taken it out may replace it.
	current chan *multiplexCall
}

// Multiplex makes one. Its calls carry the metadata of ctx and end with it; the first is made with
// the first request.
func (c *Client) Multiplex(ctx context.Context, config MultiplexConfig) (*Multiplex, error) {
	if err := config.check(); err != nil {
		return nil, err
	}
	m := &Multiplex{client: c, config: config, current: make(chan *multiplexCall, 1)}
	m.ctx, m.cancel = context.WithCancel(ctx)
	m.current <- nil
	return m, nil
}

// Close ends all calls, and so all open requests, with codes.Canceled; it returns nil, to be an
// io.Closer.
func (m *Multiplex) Close() error {
	m.cancel()
	return nil
}

// Generate is Client.Generate over the shared call. The deadline of ctx travels as total_timeout;
// of its metadata only traceparent does. Reading the Stream gives credit for more output, so a
// request that no client reads does not hold up the others.
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
// only after Stream.Grant. A request left without credit for too long fails with READER_STALLED.
func (m *Multiplex) GenerateWithCredit(
	ctx context.Context, request *pb.GenerateRequest, numTokens uint32,
) *Stream {
	return newStream(ctx, m.client, request, func(ctx context.Context) (source, error) {
		return m.submit(ctx, request, numTokens, 0)
	})
}

// Grant lets the server send more tokens of a request begun by Multiplex.GenerateWithCredit. Any
// goroutine may call it.
func (s *Stream) Grant(ctx context.Context, numTokens uint32) error {
	s.mu.Lock()
	lane, ok := s.source.(*laneSource)
	s.mu.Unlock()
	if !ok || lane.topUp != 0 {
		return &Error{
			Code:    codes.FailedPrecondition,
			Message: "the stream was not begun by GenerateWithCredit, or goes on without credit",
		}
	}
	if numTokens == 0 {
		return &Error{Code: codes.InvalidArgument, Message: "numTokens: must be at least 1"}
	}
	return lane.grant(ctx, numTokens)
}

// submit starts a request, on a new call if there is none that takes it. topUp is how many tokens
// are taken before credit is given for them; 0 leaves that to the caller.
func (m *Multiplex) submit(
	ctx context.Context, request *pb.GenerateRequest, credit, topUp uint32,
) (source, error) {
	submit := &pb.MultiplexSubmit{
		Generation: withDeadline(ctx, request), NumCreditTokens: &credit,
	}
	if traceparent := traceparentOf(ctx); traceparent != "" {
		submit.Traceparent = &traceparent
	}
	// What cannot be encoded would end the call, and every request on it.
	encoded, err := proto.Marshal(submit)
	if err != nil {
		return nil, unfitError(submit, err)
	}
	if size := len(encoded) + commandBytes; size > m.config.MaxRequestBytes {
		return nil, &Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf(
			"the request has %d bytes, and may have %d", size, m.config.MaxRequestBytes)}
	}
	var call *multiplexCall
	select {
	case call = <-m.current:
	case <-ctx.Done():
		return nil, contextEnded(ctx.Err())
	}
	lane, err := call.join(topUp)
	if lane == nil {
		call.retire()
		call = m.newCall()
		lane, err = call.join(topUp)
	}
	m.current <- call
	if lane == nil {
		return nil, err
	}
	submit.Key = lane.key
	err = call.send(ctx, &pb.MultiplexRequest{
		Command: &pb.MultiplexRequest_Submit{Submit: submit},
	})
	if err != nil {
		call.forget(lane)
		return nil, err
	}
	go lane.watch(ctx)
	return &laneSource{lane: lane, ctx: ctx}, nil
}

// What key and tags add to a submit at most.
const commandBytes = 32

// withDeadline is the request with the deadline of ctx as its total_timeout, unless that is earlier
// already.
func withDeadline(ctx context.Context, request *pb.GenerateRequest) *pb.GenerateRequest {
	deadline, ok := ctx.Deadline()
	if !ok {
		return request
	}
	left := time.Until(deadline)
	if left <= 0 {
		left = 1 // it must be positive, and ctx is about to end
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
