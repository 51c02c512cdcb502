package penstock

import (
	"context"
	"errors"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "penstock/v1"
)

const testTimeout = 10 * time.Second

// fakeService returns the responses that a test sets.
type fakeService struct {
	pb.UnimplementedGenerationServiceServer
	generate  func(*pb.GenerateRequest, pb.GenerationService_GenerateServer) error
	resume    func(*pb.ResumeRequest, pb.GenerationService_ResumeServer) error
	multiplex func(pb.GenerationService_MultiplexServer) error
	cancel    func(*pb.CancelRequest) (*pb.CancelResponse, error)
}

func (f *fakeService) Generate(
	request *pb.GenerateRequest, stream pb.GenerationService_GenerateServer,
) error {
	return f.generate(request, stream)
}

func (f *fakeService) Resume(
	request *pb.ResumeRequest, stream pb.GenerationService_ResumeServer,
) error {
	return f.resume(request, stream)
}

func (f *fakeService) Multiplex(stream pb.GenerationService_MultiplexServer) error {
	return f.multiplex(stream)
}

func (f *fakeService) Cancel(
	_ context.Context, request *pb.CancelRequest,
) (*pb.CancelResponse, error) {
	return f.cancel(request)
}

// serve starts the service in memory. It returns a context for the test, and a client.
func serve(t *testing.T, service *fakeService, opts ...Option) (context.Context, *Client) {
	t.Helper()
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	pb.RegisterGenerationServiceServer(server, service)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	dialer := func(context.Context, string) (net.Conn, error) { return listener.Dial() }
	opts = append(opts, WithDialOptions(grpc.WithContextDialer(dialer)))
	client, err := Dial("127.0.0.1", opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx, client
}

func accepted(id string) *pb.GenerateResponse {
	return &pb.GenerateResponse{Event: &pb.GenerateResponse_Accepted{
		Accepted: &pb.RequestAccepted{RequestId: id},
	}}
}

func tokens(sequence uint64, text string) *pb.GenerateResponse {
	return &pb.GenerateResponse{Sequence: sequence, Event: &pb.GenerateResponse_Tokens{
		Tokens: &pb.TokenDelta{Text: text, NumTokens: 1},
	}}
}

func finished(sequence uint64) *pb.GenerateResponse {
	return &pb.GenerateResponse{Sequence: sequence, Event: &pb.GenerateResponse_Finished{
		Finished: &pb.RequestFinished{},
	}}
}

// rejection returns a status with a reason and a retry delay.
func rejection(t *testing.T, code codes.Code, reason string, after time.Duration) error {
	t.Helper()
	s, err := status.New(code, "no").WithDetails(
		&errdetails.ErrorInfo{Domain: errorDomain, Reason: reason},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(after)},
	)
	if err != nil {
		t.Fatal(err)
	}
	return s.Err()
}

func sendAll(send func(*pb.GenerateResponse) error, messages ...*pb.GenerateResponse) error {
	for _, message := range messages {
		if err := send(message); err != nil {
			return err
		}
	}
	return nil
}

// textOf reads a stream to its end and returns the text.
func textOf(stream *Stream) (string, error) {
	text := ""
	for stream.Next() {
		text += stream.Response().GetTokens().GetText()
	}
	return text, stream.Err()
}

func TestTraceAndTokenTravel(t *testing.T) {
	trace := NewTraceContext()
	got := make(chan metadata.MD, 1)
	ctx, client := serve(t, &fakeService{
		generate: func(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
			md, _ := metadata.FromIncomingContext(s.Context())
			got <- md
			return sendAll(s.Send, accepted("a"), finished(1))
		},
	}, WithToken("secret"))
	stream := client.Generate(ContextWithTrace(ctx, trace), &pb.GenerateRequest{})
	if _, err := textOf(stream); err != nil {
		t.Fatal(err)
	}
	md := <-got
	if values := md.Get("traceparent"); len(values) != 1 || values[0] != trace.Traceparent {
		t.Errorf("traceparent is %v", values)
	}
	if values := md.Get("authorization"); len(values) != 1 || values[0] != "Bearer secret" {
		t.Errorf("authorization is %v", values)
	}
}

func TestRejectedCallIsTriedAgain(t *testing.T) {
	numCalls := 0
	ctx, client := serve(t, &fakeService{
		generate: func(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
			if numCalls++; numCalls == 1 {
				return rejection(t, codes.ResourceExhausted, "QUEUE_FULL", time.Millisecond)
			}
			return sendAll(s.Send, accepted("a"), tokens(1, "x"), finished(2))
		},
	})
	text, err := textOf(client.Generate(ctx, &pb.GenerateRequest{}))
	if err != nil || text != "x" || numCalls != 2 {
		t.Errorf("%q, %v after %d calls", text, err, numCalls)
	}
}

func TestRejectionIsReturnedWhenAttemptsEnd(t *testing.T) {
	numCalls := 0
	ctx, client := serve(t, &fakeService{
		generate: func(*pb.GenerateRequest, pb.GenerationService_GenerateServer) error {
			numCalls++
			return rejection(t, codes.ResourceExhausted, "QUEUE_FULL", time.Millisecond)
		},
	})
	_, err := textOf(client.Generate(ctx, &pb.GenerateRequest{}))
	var failed *Error
	if !errors.As(err, &failed) || failed.RetryAfter != time.Millisecond ||
		!failed.HasReason(pb.ErrorReason_ERROR_REASON_QUEUE_FULL) {
		t.Errorf("the error is %v", err)
	}
	if numCalls != DefaultRetry().MaxAttempts {
		t.Errorf("%d calls", numCalls)
	}
}

func TestOutputStandsAgainstRetry(t *testing.T) {
	numCalls := 0
	ctx, client := serve(t, &fakeService{
		generate: func(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
			numCalls++
			if err := sendAll(s.Send, accepted("a"), tokens(1, "x")); err != nil {
				return err
			}
			return status.Error(codes.Unavailable, "gone")
		},
	})
	text, err := textOf(client.Generate(ctx, &pb.GenerateRequest{}))
	if text != "x" || status.Code(err) != codes.Unavailable || numCalls != 1 {
		t.Errorf("%q, %v after %d calls", text, err, numCalls)
	}
}

func TestBrokenStreamsAreErrors(t *testing.T) {
	for name, messages := range map[string][]*pb.GenerateResponse{
		"a gap":              {accepted("a"), tokens(2, "x"), finished(3)},
		"no accepted":        {tokens(0, "x"), finished(1)},
		"no finished":        {accepted("a"), tokens(1, "x")},
		"more than finished": {accepted("a"), finished(1), tokens(2, "x")},
	} {
		messages := messages
		t.Run(name, func(t *testing.T) {
			ctx, client := serve(t, &fakeService{
				generate: func(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
					return sendAll(s.Send, messages...)
				},
			})
			_, err := textOf(client.Generate(ctx, &pb.GenerateRequest{}))
			var failed *Error
			if !errors.As(err, &failed) || failed.Reason != ReasonStreamBroken {
				t.Errorf("the error is %v", err)
			}
		})
	}
}

// notUnicode is a request with a string that is not UTF-8, which no message can contain.
func notUnicode() *pb.GenerateRequest {
	return &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_TextPrompt{TextPrompt: &pb.TextPrompt{Text: "private\xff"}},
		Stopping: &pb.StoppingOptions{StopStrings: []string{"a", "\xc3"}},
	}
}

func requireNotUnicode(t *testing.T, err error) {
	t.Helper()
	var failed *Error
	if !errors.As(err, &failed) || failed.Code != codes.InvalidArgument {
		t.Fatalf("the error is %v", err)
	}
	wanted := []FieldViolation{
		{Field: "stopping.stop_strings[1]", Description: "is not valid UTF-8"},
		{Field: "text_prompt.text", Description: "is not valid UTF-8"},
	}
	if !reflect.DeepEqual(failed.FieldViolations, wanted) {
		t.Errorf("violations: %v", failed.FieldViolations)
	}
	if strings.Contains(failed.Error(), "private") {
		t.Errorf("it quotes the prompt: %v", failed)
	}
}

func TestWhatIsNotUTF8IsTheCallersMistake(t *testing.T) {
	ctx, client := serve(t, &fakeService{
		generate: func(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
			return sendAll(s.Send, accepted("a"), finished(1))
		},
	})
	_, err := textOf(client.Generate(ctx, notUnicode()))
	requireNotUnicode(t, err)
	_, err = client.GenerateOnce(ctx, notUnicode())
	requireNotUnicode(t, err)
}

func TestPlainTokenStaysOnThisMachine(t *testing.T) {
	if _, err := Dial("model-host:50051", WithToken("secret")); err == nil {
		t.Error("it would cross the network in plain text")
	}
}

func TestTargets(t *testing.T) {
	for address, wanted := range map[string]string{
		"host":             "host:50051",
		"host:1":           "host:1",
		"[::1]":            "[::1]:50051",
		"[::1]:7":          "[::1]:7",
		"dns:///host:1":    "dns:///host:1",
		"unix:/run/socket": "unix:/run/socket",
		"host:":            "",
		"host:70000":       "",
		"http://host:1":    "",
		"::1":              "",
		"":                 "",
	} {
		got, err := grpcTarget(address)
		if got != wanted || (err == nil) != (wanted != "") {
			t.Errorf("%q: %q, %v", address, got, err)
		}
	}
}
