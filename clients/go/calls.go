package penstock

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

// interceptUnary adds the trace context to a call and converts its failure to an *Error.
func (c *Client) interceptUnary(
	ctx context.Context, method string, request, reply interface{}, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	if c.hasClosed() {
		return clientClosed()
	}
	var trailer metadata.MD
	opts = append(opts, grpc.Trailer(&trailer))
	err := invoke(withTraceMetadata(ctx), method, request, reply, conn, opts...)
	if err == nil {
		return nil
	}
	e := c.explain(ctx, err, trailer)
	if e.Code == codes.Internal {
		if invalid := encodingError(request); invalid != nil {
			return invalid
		}
	}
	return e
}

// interceptStream is like interceptUnary, for streams.
func (c *Client) interceptStream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if c.hasClosed() {
		return nil, clientClosed()
	}
	stream, err := open(withTraceMetadata(ctx), desc, conn, method, opts...)
	if err != nil {
		return nil, c.explain(ctx, err, nil)
	}
	return &explainedStream{ClientStream: stream, client: c}, nil
}

func (c *Client) explain(ctx context.Context, err error, trailer metadata.MD) *Error {
	e := errorFromCall(err, trailer)
	if ctx.Err() == nil && !c.hasClosed() {
		return e.cancelledToUnavailable()
	}
	return e
}

// explainedStream converts the failures of a stream to *Error.
type explainedStream struct {
	grpc.ClientStream
	client    *Client
	hasAnswer bool
}

// SendMsg fails with io.EOF when the call has ended. RecvMsg then returns the reason.
func (s *explainedStream) SendMsg(message interface{}) error {
	err := s.ClientStream.SendMsg(message)
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	if invalid := encodingError(message); invalid != nil {
		return invalid
	}
	return errorFromCall(err, nil)
}

func (s *explainedStream) RecvMsg(message interface{}) error {
	err := s.ClientStream.RecvMsg(message)
	if err == nil {
		s.hasAnswer = true
		return nil
	}
	if errors.Is(err, io.EOF) {
		return err
	}
	if s.hasAnswer {
		return errorFromCall(err, s.Trailer())
	}
	return s.client.explain(s.Context(), err, s.Trailer())
}

// detached has the values of a context, but neither its deadline nor its cancellation.
type detached struct{ context.Context }

func (detached) Deadline() (deadline time.Time, ok bool) { return time.Time{}, false }
func (detached) Done() <-chan struct{}                   { return nil }
func (detached) Err() error                              { return nil }
