package penstock

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	pb "penstock/v1"
)

// Stream is the response to one request, read message by message:
//
//	stream := client.Generate(ctx, request)
//	defer stream.Close()
//	for stream.Next() {
//		fmt.Print(stream.Response().GetTokens().GetText())
//	}
//	if err := stream.Err(); err != nil { ... }
//
// A stream that ends without an error is complete: gaps, events in the wrong order, and an end
// without the finished event are errors. One goroutine reads. Other goroutines may call only
// methods that are documented so.
type Stream struct {
	ctx    context.Context
	cancel context.CancelFunc
	client *Client
	// open starts the request; nil for a stream that was resumed.
	open func(ctx context.Context) (source, error)

	attempts attempts
	recovery recovery
	current  *pb.GenerateResponse
	err      error

	mu         sync.Mutex
	source     source
	sourceErr  error
	reader     streamReader
	hasEnded   bool
	isDetached bool
	requestID  string
}

// source is one attempt at a stream.
type source interface {
	// recv returns io.EOF when the attempt has ended without an error.
	recv() (*pb.GenerateResponse, error)
	header() (metadata.MD, error)
	stop()
}

// Generate streams the response to a request. Stream.Err returns failures. Retries follow the
// client's RetryPolicy.
//
// If the request has a resume_timeout, the stream reconnects by itself after a lost connection.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest) *Stream {
	return newStream(ctx, c, request, func(ctx context.Context) (source, error) {
		return c.callGenerate(ctx, request)
	})
}

func newStream(
	ctx context.Context, c *Client, request *pb.GenerateRequest,
	open func(context.Context) (source, error),
) *Stream {
	s := &Stream{client: c, open: open, attempts: newAttempts(c)}
	s.recovery.resumeTimeout = request.GetResumeTimeout().AsDuration()
	s.requestID = request.GetRequestId()
	s.start(ctx)
	return s
}

func (s *Stream) start(ctx context.Context) {
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.connect()
}

// connect makes the next attempt. The next receive reports its failure.
func (s *Stream) connect() {
	var opened source
	var err error
	if s.open == nil || s.recovery.isUnderWay {
		s.mu.Lock()
		point := s.reader.nextPoint()
		s.mu.Unlock()
		opened, err = s.client.callResume(s.ctx, point)
	} else {
		opened, err = s.open(s.ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.source, s.sourceErr = opened, err
}

// Next reads the next message. It returns false at the end of the stream; see Err.
func (s *Stream) Next() bool {
	for !s.isOver() {
		response, err := s.receive()
		if err == nil {
			s.current = response
			return true
		}
		failed := s.asOwnError(err)
		delay, ok := s.delayAfter(failed)
		if !ok {
			s.finish(s.recovery.explain(failed))
			break
		}
		s.stopSource()
		if err := sleep(s.ctx, delay); err != nil {
			s.finish(contextEnded(err).ofRequest(s.reader.point.RequestID))
			break
		}
		s.connect()
	}
	s.current = nil
	return false
}

// Response returns the message that Next has read.
func (s *Stream) Response() *pb.GenerateResponse { return s.current }

// Err returns the *Error that ended the stream; nil while the stream continues and if it is
// complete.
func (s *Stream) Err() error { return s.err }

// Header waits for the initial metadata of the current attempt. It returns nil for a request of a
// Multiplex.
func (s *Stream) Header() (metadata.MD, error) {
	s.mu.Lock()
	source, err := s.source, s.sourceErr
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return source.header()
}

// Point returns the position up to which the stream was read, for Client.Resume in this or another
// process.
func (s *Stream) Point() ResumePoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	point := s.reader.point
	point.ReceivedTokenCounts = append([]uint32(nil), point.ReceivedTokenCounts...)
	point.ResumeTimeout = s.recovery.resumeTimeout
	return point
}

// Cancel ends the request on the server. The stream then ends without an error, with
// FINISH_REASON_CANCELLED. Other goroutines may call it when the request id is known: when the
// server has reported it, or if the request has one.
func (s *Stream) Cancel(ctx context.Context) error {
	s.mu.Lock()
	source, requestID := s.source, s.requestID
	s.mu.Unlock()
	if multiplexed, ok := source.(*multiplexedSource); ok {
		return multiplexed.cancel(ctx)
	}
	if requestID == "" {
		return &Error{Code: codes.FailedPrecondition, Message: "the request's id is not known yet"}
	}
	_, err := s.client.Cancel(ctx, requestID)
	return err
}

// Close closes the stream, and cancels the request on the server if it has not ended. Any goroutine
// may call it, also repeatedly. It returns nil; it implements io.Closer.
func (s *Stream) Close() error {
	s.end(true)
	return nil
}

// Detach closes the stream without ending the request, which continues for its resume_timeout.
// Client.Resume continues from Point. Over a Multiplex that time starts at the end of its call.
func (s *Stream) Detach() {
	s.mu.Lock()
	s.isDetached = true
	if multiplexed, ok := s.source.(*multiplexedSource); ok {
		multiplexed.call.abandon(multiplexed.multiplexedRequest)
	}
	s.mu.Unlock()
	_ = s.Close()
}

// receive reads from the current attempt. It returns io.EOF after the finished event.
func (s *Stream) receive() (*pb.GenerateResponse, error) {
	s.mu.Lock()
	source, err := s.source, s.sourceErr
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	for {
		response, err := source.recv()
		s.mu.Lock()
		if errors.Is(err, io.EOF) {
			response, err = s.reader.end()
			s.hasEnded = s.hasEnded || err == nil
		} else if err == nil {
			response, err = s.reader.receive(response)
			if id := s.reader.point.RequestID; id != "" {
				s.requestID = id
			}
		}
		s.mu.Unlock()
		if response != nil || err != nil {
			if err == nil && response.GetFinished() != nil {
				s.cancel()
			}
			return response, err
		}
	}
}

// delayAfter returns how long to wait before the next attempt; false to report the error.
func (s *Stream) delayAfter(err *Error) (delay time.Duration, ok bool) {
	if s.ctx.Err() != nil || s.client.hasClosed() {
		return 0, false
	}
	if delay, ok = s.recovery.delayAfter(err, s.reader.point); ok {
		return delay, true
	}
	if s.open == nil {
		// Resuming again is safe, because nothing is delivered twice.
		return s.attempts.delayAfter(s.ctx, err)
	}
	if s.reader.hasOutput {
		return 0, false
	}
	if delay, ok = s.attempts.delayAfter(s.ctx, s.recovery.explain(err)); ok {
		s.mu.Lock()
		s.reader = streamReader{}
		s.mu.Unlock()
	}
	return delay, ok
}

// finish ends the stream with an error.
func (s *Stream) finish(err *Error) {
	s.err = err
	s.end(err.Code == codes.Canceled)
}

// end releases the stream. isLeft is true if the remaining stream will not be read.
func (s *Stream) end(isLeft bool) {
	s.mu.Lock()
	mayContinue := !s.hasEnded && !s.isDetached && s.recovery.resumeTimeout > 0 && s.requestID != ""
	s.hasEnded = true
	requestID := s.requestID
	s.mu.Unlock()
	s.cancel()
	if isLeft && mayContinue {
		s.client.leave(s.ctx, requestID)
	}
}

func (s *Stream) isOver() bool {
	if s.err != nil {
		return true
	}
	s.mu.Lock()
	hasEnded := s.hasEnded
	s.mu.Unlock()
	if hasEnded && !s.reader.isComplete {
		s.err = contextEnded(context.Canceled).ofRequest(s.reader.point.RequestID)
	}
	return hasEnded
}

// asOwnError reports that the client was closed, regardless of the error of gRPC.
func (s *Stream) asOwnError(err error) *Error {
	failed := asError(err)
	isCut := failed.Code == codes.Canceled || failed.Code == codes.Unavailable
	if isCut && failed.Reason == "" && s.client.hasClosed() {
		failed = clientClosed()
	}
	return failed.ofRequest(s.reader.point.RequestID)
}

func (s *Stream) stopSource() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.source != nil {
		s.source.stop()
	}
}
