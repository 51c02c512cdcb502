package penstock

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc/metadata"

	pb "penstock/v1"
)

// lane is one request on a Multiplex call: what came and was not taken yet, its credit, its end.
// What waits is bounded by the credit that was given.
type lane struct {
	call  *multiplexCall
	key   uint64
	topUp uint32
	news  chan struct{} // holds one when there is something to take
	over  chan struct{} // closed at the end

	mu       sync.Mutex
	waiting  []*pb.GenerateResponse
	err      error // io.EOF after a good end
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

// fail ends the lane after what came before; the first end counts.
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
	case l.news <- struct{}{}:
	default:
	}
}

// take is the next message and the credit that is due for it; all nothing when it has not come.
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

// watch leaves the lane when ctx ends before it does.
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

// laneSource is a lane as an attempt at a stream, which ends with ctx.
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
				// Its failure is reported by what is received next.
				_ = s.grant(s.ctx, credit)
			}
			return message, nil
		}
		select {
		case <-s.news:
		case <-s.ctx.Done():
		}
	}
}

func (s *laneSource) header() (metadata.MD, error) { return nil, nil }

// stop has nothing to do: an attempt that is given up has failed, and its lane ended with that.
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
