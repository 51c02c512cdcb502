package penstock

import (
	"context"
	"math"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	pb "penstock/v1"
)

const (
	firstResumeDelay = 50 * time.Millisecond
	maxResumeDelay   = time.Second
)

// ResumePoint is the position up to which the stream of a request was read. With it another process
// can continue the stream.
type ResumePoint struct {
	RequestID string
	// NextSequence is the sequence number of the next message.
	NextSequence uint64
	// ReceivedTokenCounts has the number of tokens received of each output.
	ReceivedTokenCounts []uint32
	// ResumeTimeout is the resume_timeout of the request. For this time after a loss, the resumed
	// stream reconnects by itself. If it is 0, it does not reconnect.
	ResumeTimeout time.Duration
}

func (p *ResumePoint) count(tokens *pb.TokenDelta) {
	// The server has validated the number of outputs, but a wrong index must not allocate memory
	// here.
	const maxOutputs = 1 << 16
	index := int(tokens.GetOutputIndex())
	for index >= len(p.ReceivedTokenCounts) && index < maxOutputs {
		p.ReceivedTokenCounts = append(p.ReceivedTokenCounts, 0)
	}
	if index < len(p.ReceivedTokenCounts) {
		p.ReceivedTokenCounts[index] += tokens.GetNumTokens()
	}
}

// Resume continues the stream of a request with a resume_timeout after its connection, the server
// process or the client was lost. The stream of an earlier reader ends.
func (c *Client) Resume(ctx context.Context, point ResumePoint) *Stream {
	s := &Stream{client: c, attempts: newAttempts(c), requestID: point.RequestID}
	point.ReceivedTokenCounts = append([]uint32(nil), point.ReceivedTokenCounts...)
	s.reader.point = point
	s.recovery = recovery{
		resumeTimeout: point.ResumeTimeout, isUnderWay: true, sequence: point.NextSequence,
	}
	s.start(ctx)
	return s
}

// recovery tracks the lost connections of one stream. Each is followed by a Resume within
// resumeTimeout, or reported.
type recovery struct {
	resumeTimeout time.Duration
	isUnderWay    bool // the next attempt is a Resume
	first         *Error
	lostAt        time.Time
	sequence      uint64
	numFailed     int
}

// delayAfter returns how long to wait before the stream is resumed; false if it cannot be resumed.
func (r *recovery) delayAfter(err *Error, point ResumePoint) (time.Duration, bool) {
	isEngineDown := err.HasReason(pb.ErrorReason_ERROR_REASON_ENGINE_DOWN)
	isLoss := !isEngineDown && (err.Code == codes.Unavailable || err.Reason == ReasonStreamBroken)
	hasProgressed := point.NextSequence > r.sequence
	// No engine runs from which the stream could be resumed. A stream that has continued gets the
	// same error when the request itself fails.
	isOutOfReach := r.isUnderWay && !hasProgressed && isEngineDown
	// Without a request id the server has accepted nothing, so there is nothing to resume.
	if r.resumeTimeout <= 0 || point.RequestID == "" || !(isLoss || isOutOfReach) {
		r.isUnderWay = false
		return 0, false
	}
	if r.first == nil || hasProgressed {
		// The stream had continued, so this is a new loss with a new resume timeout.
		r.first, r.lostAt, r.numFailed = err, time.Now(), 0
	}
	r.sequence, r.isUnderWay = point.NextSequence, true
	backoff := math.Min(
		float64(firstResumeDelay)*math.Pow(2, float64(r.numFailed)), float64(maxResumeDelay))
	r.numFailed++
	delay := time.Duration(backoff * (0.5 + 0.5*jitter()))
	if err.RetryAfter > delay {
		delay = err.RetryAfter
	}
	if time.Since(r.lostAt)+delay > r.resumeTimeout {
		r.isUnderWay = false
		return 0, false
	}
	return delay, true
}

// explain returns the error to report. If the request was not found, that is the original loss.
func (r *recovery) explain(err *Error) *Error {
	if r.first != nil && err.HasReason(pb.ErrorReason_ERROR_REASON_REQUEST_NOT_FOUND) {
		return r.first
	}
	return err
}

// callGenerate and callResume make one attempt each, which ends with ctx or when it is stopped.
func (c *Client) callGenerate(ctx context.Context, request *pb.GenerateRequest) (source, error) {
	ctx, cancel := context.WithCancel(ctx)
	call, err := c.generation.Generate(ctx, request)
	if err != nil {
		cancel()
		return nil, err
	}
	return &generateSource{call, cancel}, nil
}

func (c *Client) callResume(ctx context.Context, point ResumePoint) (source, error) {
	ctx, cancel := context.WithCancel(ctx)
	call, err := c.generation.Resume(ctx, &pb.ResumeRequest{
		RequestId:           point.RequestID,
		NextSequence:        point.NextSequence,
		ReceivedTokenCounts: point.ReceivedTokenCounts,
	})
	if err != nil {
		cancel()
		return nil, err
	}
	return &resumeSource{call, cancel}, nil
}

type generateSource struct {
	call   pb.GenerationService_GenerateClient
	cancel context.CancelFunc
}

func (s *generateSource) recv() (*pb.GenerateResponse, error) { return s.call.Recv() }
func (s *generateSource) header() (metadata.MD, error)        { return s.call.Header() }
func (s *generateSource) stop()                               { s.cancel() }

type resumeSource struct {
	call   pb.GenerationService_ResumeClient
	cancel context.CancelFunc
}

func (s *resumeSource) recv() (*pb.GenerateResponse, error) {
	message, err := s.call.Recv()
	return message.GetResponse(), err
}
func (s *resumeSource) header() (metadata.MD, error) { return s.call.Header() }
func (s *resumeSource) stop()                        { s.cancel() }
