package penstock

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc/metadata"

	pb "penstock/v1"
)

// lane is one request on a Multiplex call: its messages that were received and not taken yet, its
// credit, and its end. The number of these messages is limited by the credit.
type lane struct {
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

func (l *lane) put(message *pb.GenerateResponse) {
	l.mu.Lock()
	l.waiting = append(l.waiting, message)
	l.mu.Unlock()
	if message.GetFinished() != nil {
		l.fail(io.EOF)
		return
	}
	l.wake()
}

// fail ends the lane after the messages received so far. Only the first end takes effect.
func (l *lane) fail(err error) {
	l.mu.Lock()
	if l.err == nil {
		l.err = err
		close(l.over)
	}
	l.mu.Unlock()
	l.wake()
}

func (l *lane) wake() {
	select {
	case l.pending <- struct{}{}:
	default:
	}
}

// take returns the next message and the credit that is due for it; all zero if there is none yet.
func (l *lane) take() (message *pb.GenerateResponse, credit uint32, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		return nil, 0, l.err
	}
	message = l.waiting[0]
	l.waiting[0] = nil
	l.waiting = l.waiting[1:]
	l.numTaken += message.GetTokens().GetNumTokens()
	if l.topUp > 0 && l.numTaken >= l.topUp && l.err == nil {
		credit, l.numTaken = l.numTaken, 0
	}
	return message, credit, nil
}

// watch closes the lane if ctx ends first.
func (l *lane) watch(ctx context.Context) {
	select {
	case <-l.over:
	case <-ctx.Done():
		l.call.leave(l)
	}
}

func (l *lane) cancelCommand() *pb.MultiplexRequest {
	return &pb.MultiplexRequest{
		Command: &pb.MultiplexRequest_Cancel{Cancel: &pb.MultiplexCancel{Key: l.key}},
	}
}

// laneSource adapts a lane to a source, which ends with ctx.
type laneSource struct {
	*lane
	ctx context.Context
}

func (s *laneSource) recv() (*pb.GenerateResponse, error) {
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

func (s *laneSource) header() (metadata.MD, error) { return nil, nil }

// stop does nothing: an attempt is stopped only after it has failed, and its lane has then ended.
func (s *laneSource) stop() {}

func (s *laneSource) grant(ctx context.Context, numTokens uint32) error {
	return s.call.send(ctx, &pb.MultiplexRequest{
		Command: &pb.MultiplexRequest_Credit{
			Credit: &pb.MultiplexCredit{Key: s.key, NumCreditTokens: numTokens},
		},
	})
}

func (s *laneSource) cancel(ctx context.Context) error {
	return s.call.send(ctx, s.cancelCommand())
}
