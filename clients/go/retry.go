package penstock

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"math"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	pb "penstock/v1"
)

// RetryPolicy defines how often and after what delay a call is retried.
//
// A call is retried only if all of these conditions hold: none of its output was delivered; its
// status is UNAVAILABLE, or RESOURCE_EXHAUSTED for a full queue, a quota or with a retry delay; the
// server did not forbid retries; attempts are left; and the wait ends before the deadline. The wait
// is the server's retry delay plus up to PushbackJitter of it. Without a retry delay it is between
// half and all of InitialBackoff, which grows by Multiplier up to MaxBackoff. As in gRFC A6
// (client-side retry).
type RetryPolicy struct {
	MaxAttempts    int
	InitialBackoff time.Duration
	Multiplier     float64
	MaxBackoff     time.Duration
	PushbackJitter float64
}

// DefaultRetry makes at most four attempts.
func DefaultRetry() RetryPolicy {
	return RetryPolicy{
		MaxAttempts:    4,
		InitialBackoff: 200 * time.Millisecond,
		Multiplier:     2,
		MaxBackoff:     5 * time.Second,
		PushbackJitter: 0.2,
	}
}

// NoRetry reports each failure immediately.
func NoRetry() RetryPolicy { return RetryPolicy{MaxAttempts: 1, Multiplier: 1} }

func (p RetryPolicy) check() error {
	switch {
	case p.MaxAttempts < 1:
		return errors.New("penstock: retry: MaxAttempts must be at least 1")
	case p.InitialBackoff < 0 || p.MaxBackoff < 0:
		return errors.New("penstock: retry: InitialBackoff and MaxBackoff must not be negative")
	case !(p.Multiplier >= 1) || math.IsInf(p.Multiplier, 0):
		return errors.New("penstock: retry: Multiplier must be finite and at least 1")
	case !(p.PushbackJitter >= 0) || math.IsInf(p.PushbackJitter, 0):
		return errors.New("penstock: retry: PushbackJitter must be finite and not negative")
	}
	return nil
}

// delay returns how long to wait after attempt number attempt, counted from 1, has failed.
func (p RetryPolicy) delay(err *Error, attempt int, jitter float64) time.Duration {
	if err.RetryAfter > 0 {
		return err.RetryAfter + time.Duration(float64(err.RetryAfter)*p.PushbackJitter*jitter)
	}
	backoff := float64(p.InitialBackoff) * math.Pow(p.Multiplier, float64(attempt-1))
	backoff = math.Min(backoff, float64(p.MaxBackoff))
	return time.Duration(backoff * (0.5 + 0.5*jitter))
}

// isTransient returns whether the same call may succeed soon. Without details, RESOURCE_EXHAUSTED
// usually means a message over a size limit, which is permanent.
func isTransient(err *Error) bool {
	if err.IsRetryForbidden || err.HasReason(pb.ErrorReason_ERROR_REASON_READER_STALLED) {
		return false
	}
	if err.Code == codes.ResourceExhausted {
		return err.RetryAfter > 0 || err.HasReason(pb.ErrorReason_ERROR_REASON_QUEUE_FULL) ||
			err.HasReason(pb.ErrorReason_ERROR_REASON_QUOTA_EXCEEDED)
	}
	return err.Code == codes.Unavailable
}

// attempts counts the attempts of one logical call.
type attempts struct {
	client    *Client
	numFailed int
}

func newAttempts(client *Client) attempts {
	client.budget.deposit()
	return attempts{client: client}
}

// delayAfter counts a failed attempt. It returns how long to wait before the next one; false if
// there is none.
func (a *attempts) delayAfter(ctx context.Context, err *Error) (time.Duration, bool) {
	a.numFailed++
	policy := a.client.retry
	if a.numFailed >= policy.MaxAttempts || !isTransient(err) || a.client.hasClosed() {
		return 0, false
	}
	delay := policy.delay(err, a.numFailed, jitter())
	if deadline, ok := ctx.Deadline(); ok && delay >= time.Until(deadline) {
		return 0, false
	}
	return delay, a.client.budget.take()
}

// retrying makes a call with one response, with as many attempts as the client allows.
func retrying[T any](ctx context.Context, c *Client, call func() (T, error)) (T, error) {
	attempts := newAttempts(c)
	for {
		answer, err := call()
		if err == nil {
			return answer, nil
		}
		delay, ok := attempts.delayAfter(ctx, asError(err))
		if !ok {
			return answer, err
		}
		if err := sleep(ctx, delay); err != nil {
			return answer, contextEnded(err)
		}
	}
}

// retryBudget limits the total number of retries of all calls of a client: over any period, retries
// are at most the reserve plus a share of the calls in it. A limit per call does not limit the
// total. It is the retry budget of Finagle and of "Addressing Cascading Failures" in Site
// Reliability Engineering (O'Reilly, 2016), here without a clock.
type retryBudget struct {
	mu   sync.Mutex
	left float64
}

const (
	budgetShare   = 0.2
	budgetReserve = 100.0
)

func newRetryBudget() *retryBudget { return &retryBudget{left: budgetReserve} }

func (b *retryBudget) deposit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = math.Min(budgetReserve, b.left+budgetShare)
}

func (b *retryBudget) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	// In floating point, five times a fifth may be slightly less than one.
	if b.left < 1-1e-9 {
		return false
	}
	b.left--
	return true
}

// sleep waits, or returns why ctx ended before.
func sleep(ctx context.Context, delay time.Duration) error {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// jitter returns a uniform random number in [0, 1), different in each process.
func jitter() float64 {
	var bits [8]byte
	if _, err := rand.Read(bits[:]); err != nil {
		return 0.5
	}
	return float64(binary.LittleEndian.Uint64(bits[:])>>11) / (1 << 53)
}
