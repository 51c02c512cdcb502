package penstock

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc/metadata"

	pb "penstock/v1"
)

// multiplexedRequest is one request on a Multiplex call: its messages that were received and not
// taken yet, its credit, and its end. The number of these messages is limited by the credit.
type multiplexedRequest struct {
	call    *multiplexCall
	key     uint64
	topUp   uint32
	pending chan struct{} // has an item while there is something to take
	over    chan struct{} // closed at the end

	mu       sync.Mutex
	waiting  []*pb.GenerateResponse
	err      error // io.EOF after an end without an error
	numTaken uint32
}

func (r *multiplexedRequest) put(message *pb.GenerateResponse) {
	r.mu.Lock()
	r.waiting = append(r.waiting, message)
	r.mu.Unlock()
	if message.GetFinished() != nil {
		r.fail(io.EOF)
		return
	}
	r.wake()
}

// fail ends the request after the messages received so far. Only the first end takes effect.
func (r *multiplexedRequest) fail(err error) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
		close(r.over)
	}
	r.mu.Unlock()
	r.wake()
}

func (r *multiplexedRequest) wake() {
	select {
	case r.pending <- struct{}{}:
	default:
	}
}

// take returns the next message and the credit that is due for it; all zero if there is none yet.
func (r *multiplexedRequest) take() (message *pb.GenerateResponse, credit uint32, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 {
		return nil, 0, r.err
	}
	message = r.waiting[0]
	r.waiting[0] = nil
	r.waiting = r.waiting[1:]
	r.numTaken += message.GetTokens().GetNumTokens()
	if r.topUp > 0 && r.numTaken >= r.topUp && r.err == nil {
		credit, r.numTaken = r.numTaken, 0
	}
	return message, credit, nil
}

// watch ends the request if ctx ends first.
func (r *multiplexedRequest) watch(ctx context.Context) {
	select {
	case <-r.over:
	case <-ctx.Done():
		r.call.leave(r)
	}
}

func (r *multiplexedRequest) cancelCommand() *pb.MultiplexRequest {
	return &pb.MultiplexRequest{
		Command: &pb.MultiplexRequest_Cancel{Cancel: &pb.MultiplexCancel{Key: r.key}},
	}
}

// multiplexedSource adapts a request to a source, which ends with ctx.
type multiplexedSource struct {
	*multiplexedRequest
	ctx context.Context
}

func (s *multiplexedSource) recv() (*pb.GenerateResponse, error) {
	for {
		if err := s.ctx.Err(); err != nil {
			return nil, contextEnded(err)
		}
		message, credit, err := s.take()
		if err != nil {
			return nil, err
		}
		if message != nil {
			if credit > 0 {
				// The next receive reports the failure.
				_ = s.grant(s.ctx, credit)
			}
			return message, nil
		}
		select {
		case <-s.pending:
		case <-s.ctx.Done():
		}
	}
}

func (s *multiplexedSource) header() (metadata.MD, error) { return nil, nil }

// stop does nothing: an attempt is stopped only after it has failed, and its request has then ended.
func (s *multiplexedSource) stop() {}

func (s *multiplexedSource) grant(ctx context.Context, numTokens uint32) error {
	return s.call.send(ctx, &pb.MultiplexRequest{
		Command: &pb.MultiplexRequest_Credit{
			Credit: &pb.MultiplexCredit{Key: s.key, NumCreditTokens: numTokens},
		},
	})
}

func (s *multiplexedSource) cancel(ctx context.Context) error {
	return s.call.send(ctx, s.cancelCommand())
}
