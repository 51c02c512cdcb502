package penstock

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "penstock/v1"
)

const (
	errorDomain = "penstock.dev"
	pushbackKey = "grpc-retry-pushback-ms"
	// ReasonStreamBroken is the reason of an Error that only the client returns: the stream had a
	// gap, its events were in the wrong order, or it ended without the finished event.
	ReasonStreamBroken = "STREAM_BROKEN"
)

// FieldViolation is one invalid field: its path in the request, such as "sampling.temperature".
type FieldViolation struct {
	Field       string
	Description string
}

// Error is a failed call. It works with errors.As, with status.Code and status.Convert of gRPC, and
// with errors.Is for context.Canceled and context.DeadlineExceeded.
type Error struct {
	Code    codes.Code
	Message string
	// Reason is a name of pb.ErrorReason without its prefix, such as "QUEUE_FULL"; "" if the status
	// has none, because a proxy, the network or gRPC caused it.
	Reason string
	// Metadata has the other values of ErrorInfo.
	Metadata map[string]string
	// RetryAfter is the delay that the server suggests before a retry; 0 for no suggestion.
	RetryAfter time.Duration
	// IsRetryForbidden is true if the server requested that the call is not retried.
	IsRetryForbidden bool
	FieldViolations  []FieldViolation
	// RequestID is the id of the request; "" if the server has not reported it.
	RequestID string
}

// Error returns code, reason and message.
func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("penstock: %s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("penstock: %s (%s): %s", e.Code, e.Reason, e.Message)
}

// GRPCStatus is used by package status of gRPC.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// Is compares with the errors of package context.
func (e *Error) Is(target error) bool {
	return (target == context.Canceled && e.Code == codes.Canceled) ||
		(target == context.DeadlineExceeded && e.Code == codes.DeadlineExceeded)
}

// HasReason returns whether the failure has this error reason.
func (e *Error) HasReason(reason pb.ErrorReason) bool {
	return e.Reason == strings.TrimPrefix(reason.String(), "ERROR_REASON_")
}

// asError returns the Error in a returned error, or creates one.
func asError(err error) *Error {
	var found *Error
	if errors.As(err, &found) {
		return found
	}
	return errorFromCall(err, nil)
}

// errorFromCall reads the status of a call and its trailers.
func errorFromCall(err error, trailer metadata.MD) *Error {
	s, ok := status.FromError(err)
	if !ok {
		s = status.FromContextError(err)
	}
	e := &Error{Code: s.Code(), Message: s.Message()}
	e.readDetails(s)
	if values := trailer.Get(pushbackKey); len(values) > 0 {
		e.readPushback(values[len(values)-1])
	}
	return e
}

// errorFromStatus reads the status of one request of a Multiplex call.
func errorFromStatus(failed *spb.Status) *Error {
	s := status.FromProto(&spb.Status{
		Code: failed.GetCode(), Message: failed.GetMessage(), Details: failed.GetDetails(),
	})
	e := &Error{Code: s.Code(), Message: s.Message()}
	if e.Code == codes.OK || e.Code > codes.Unauthenticated {
		e.Code = codes.Unknown
	}
	e.readDetails(s)
	return e
}

// readDetails ignores details that cannot be parsed, so that they do not hide the status.
func (e *Error) readDetails(s *status.Status) {
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == errorDomain {
				e.Reason, e.Metadata = detail.GetReason(), detail.GetMetadata()
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			retryAfter := time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
			if retryAfter > e.RetryAfter {
				e.RetryAfter = retryAfter
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				e.FieldViolations = append(e.FieldViolations, FieldViolation{
					Field: violation.GetField(), Description: violation.GetDescription(),
				})
			}
		case *errdetails.RequestInfo:
			e.RequestID = detail.GetRequestId()
		}
	}
}

// readPushback reads the push-back of gRFC A6 in milliseconds. A negative or invalid value means
// that the call must not be retried.
func (e *Error) readPushback(value string) {
	milliseconds, err := strconv.ParseInt(value, 10, 32)
	if err != nil || milliseconds < 0 {
		e.IsRetryForbidden = true
		return
	}
	if retryAfter := time.Duration(milliseconds) * time.Millisecond; retryAfter > e.RetryAfter {
		e.RetryAfter = retryAfter
	}
}

// ofRequest returns the same failure with the id of its request, in case the status does not have
// it.
func (e *Error) ofRequest(requestID string) *Error {
	if e.RequestID != "" || requestID == "" {
		return e
	}
	known := *e
	known.RequestID = requestID
	return &known
}

// cancelledToUnavailable converts the error of a call that was cancelled before it began, and not
// by this client, to Unavailable. A server that shuts down cancels calls that arrive at the same
// moment, without a reason.
func (e *Error) cancelledToUnavailable() *Error {
	if e.Code != codes.Canceled || e.Reason != "" {
		return e
	}
	moved := *e
	moved.Code = codes.Unavailable
	moved.Message = "the server or a proxy cancelled the call, not this client"
	return &moved
}

func streamBroken(format string, args ...interface{}) *Error {
	return &Error{
		Code: codes.DataLoss, Reason: ReasonStreamBroken, Message: fmt.Sprintf(format, args...),
	}
}

func clientClosed() *Error {
	return &Error{Code: codes.Canceled, Message: "the client was closed"}
}

func contextEnded(err error) *Error {
	return &Error{Code: status.FromContextError(err).Code(), Message: err.Error()}
}
