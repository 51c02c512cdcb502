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
	// ReasonStreamBroken is the reason of an Error that the client finds and no server sends: the
	// stream had a gap, events in the wrong order, or an end without finished.
	ReasonStreamBroken = "STREAM_BROKEN"
)

// FieldViolation is one bad field: its path in the request, such as "sampling.temperature".
type FieldViolation struct {
	Field       string
	Description string
}

// Error is a failed call. errors.As finds it, status.Code and status.Convert of gRPC understand it,
// and errors.Is compares it with context.Canceled and context.DeadlineExceeded.
type Error struct {
	Code    codes.Code
	Message string
	// Reason is a name of pb.ErrorReason without its prefix, such as "QUEUE_FULL"; "" when the
	// status carried none (a proxy, the network, gRPC itself).
	Reason string
	// Metadata is what ErrorInfo carried besides.
	Metadata map[string]string
	// RetryAfter is how long the server suggests to wait; 0 for no suggestion.
	RetryAfter time.Duration
	// IsRetryRefused states that the server asked not to be tried again.
	IsRetryRefused  bool
	FieldViolations []FieldViolation
	// RequestID is "" as long as the server did not report it.
	RequestID string
}

// Error reports code, reason and message.
func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("penstock: %s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("penstock: %s (%s): %s", e.Code, e.Reason, e.Message)
}

// GRPCStatus is for package status of gRPC.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// Is compares with the errors of package context.
func (e *Error) Is(target error) bool {
	return (target == context.Canceled && e.Code == codes.Canceled) ||
		(target == context.DeadlineExceeded && e.Code == codes.DeadlineExceeded)
}

// HasReason is whether the failure has this reason of the contract.
func (e *Error) HasReason(reason pb.ErrorReason) bool {
	return e.Reason == strings.TrimPrefix(reason.String(), "ERROR_REASON_")
}

// asError finds the Error in what a call returned, or makes one.
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

// readDetails leaves out what cannot be read rather than hiding the status itself.
func (e *Error) readDetails(s *status.Status) {
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == errorDomain {
				e.Reason, e.Metadata = detail.GetReason(), detail.GetMetadata()
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			told := time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
			if told > e.RetryAfter {
				e.RetryAfter = told
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

// readPushback: as gRFC A6 has it, milliseconds to wait; negative or unreadable means do not retry.
func (e *Error) readPushback(value string) {
	milliseconds, err := strconv.ParseInt(value, 10, 32)
	if err != nil || milliseconds < 0 {
		e.IsRetryRefused = true
		return
	}
	if told := time.Duration(milliseconds) * time.Millisecond; told > e.RetryAfter {
		e.RetryAfter = told
	}
}

// ofRequest is the same failure with the id of its request, in case the status did not report.
func (e *Error) ofRequest(requestID string) *Error {
	if e.RequestID != "" || requestID == "" {
		return e
	}
	known := *e
	known.RequestID = requestID
	return &known
}

// unlessAsked: a call that a client else cancelled before it began counts as not served. A server
// that shuts down does so with calls that reach it in the same moment, and gives no reason.
func (e *Error) unlessAsked() *Error {
	if e.Code != codes.Canceled || e.Reason != "" {
		return e
	}
	moved := *e
	moved.Code = codes.Unavailable
	moved.Message = "the call was cancelled on its way, and not by this client"
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
