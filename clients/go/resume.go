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

// ResumePoint is how far a request's stream was read: all that another process needs to continue
// with it.
type ResumePoint struct {
	RequestID string
	// NextSequence is the sequence of the next message.
	NextSequence uint64
	// ReceivedTokenCounts counts the tokens of each output so far.
	ReceivedTokenCounts []uint32
	// GracePeriod is the request's resume_timeout: for as long the resumed stream makes lost
	// connections good by itself. 0: it does not.
	GracePeriod time.Duration
}

func (p *ResumePoint) count(tokens *pb.TokenDelta) {
	// The server has checked how many outputs there are; a wild index must not cost memory here.
	const maxOutputs = 1 << 16
	index := int(tokens.GetOutputIndex())
	for index >= len(p.ReceivedTokenCounts) && index < maxOutputs {
		p.ReceivedTokenCounts = append(p.ReceivedTokenCounts, 0)
	}
	if index < len(p.ReceivedTokenCounts) {
		p.ReceivedTokenCounts[index] += tokens.GetNumTokens()
	}
}

// Resume continues with the stream of a request that asked for it by resume_timeout, after its
// connection, the server process or the client itself was lost. It takes the stream over from
// a caller that reads it.
func (c *Client) Resume(ctx context.Context, point ResumePoint) *Stream {
	s := &Stream{client: c, attempts: newAttempts(c), requestID: point.RequestID}
	point.ReceivedTokenCounts = append([]uint32(nil), point.ReceivedTokenCounts...)
	s.reader.point = point
	s.recovery = recovery{grace: point.GracePeriod, isUnderWay: true, sequence: point.NextSequence}
	s.start(ctx)
	return s
}

// recovery is the account of one stream's losses, each of which is made good within grace, or
// reported.
type recovery struct {
	grace      time.Duration
	isUnderWay bool // the next attempt is a Resume
	first      *Error
	lostAt     time.Time
	sequence   uint64
	numFailed  int
}

// delayAfter is how long to wait before the stream is resumed; false where it cannot be.
func (r *recovery) delayAfter(err *Error, point ResumePoint) (time.Duration, bool) {
	isEngineDown := err.HasReason(pb.ErrorReason_ERROR_REASON_ENGINE_DOWN)
	isLoss := !isEngineDown && (err.Code == codes.Unavailable || err.Reason == ReasonStreamBroken)
	hasGoneOn := point.NextSequence > r.sequence
	// Then there is no engine over which it could be fetched; a stream that has continued is reported
	// so of the request itself.
	isOutOfReach := r.isUnderWay && !hasGoneOn && isEngineDown
	// Without a request id the server stated nothing, and no client waits for us.
	if r.grace <= 0 || point.RequestID == "" || !(isLoss || isOutOfReach) {
		r.isUnderWay = false
		return 0, false
	}
	if r.first == nil || hasGoneOn {
		// It had continued: this is a new loss, with a separate grace.
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
	if time.Since(r.lostAt)+delay > r.grace {
		r.isUnderWay = false
		return 0, false
	}
	return delay, true
}

// explain: that no client knows the request any more is only the end of a story that began with the
// loss.
func (r *recovery) explain(err *Error) *Error {
	if r.first != nil && err.HasReason(pb.ErrorReason_ERROR_REASON_REQUEST_NOT_FOUND) {
		return r.first
	}
	return err
}

// callGenerate and callResume make one attempt each, which ends with ctx or by stop.
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
