package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "penstock/v1"
)

func sendEvent(s pb.GenerationService_MultiplexServer, event *pb.MultiplexEvent) error {
	return s.Send(&pb.MultiplexResponse{Events: []*pb.MultiplexEvent{event}})
}

// answer sends messages of one request.
func answer(
	s pb.GenerationService_MultiplexServer, key uint64, messages ...*pb.GenerateResponse,
) error {
	return sendAll(func(message *pb.GenerateResponse) error {
		return sendEvent(s, &pb.MultiplexEvent{
			Key: key, Outcome: &pb.MultiplexEvent_Response{Response: message},
		})
	}, messages...)
}

func share(ctx context.Context, t *testing.T, client *Client, config MultiplexConfig) *Multiplex {
	t.Helper()
	shared, err := client.Multiplex(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	return shared
}

func TestCreditFollowsReading(t *testing.T) {
	config := DefaultMultiplex()
	config.WindowTokens = 4
	ctx, client := serve(t, &fakeService{
		multiplex: func(s pb.GenerationService_MultiplexServer) error {
			command, err := s.Recv()
			if err != nil {
				return err
			}
			submit := command.GetSubmit()
			if submit.GetNumCreditTokens() != 4 {
				return fmt.Errorf("submitted as %v", submit)
			}
			if err := answer(s, submit.GetKey(), accepted("a")); err != nil {
				return err
			}
			for credit, sequence := uint32(4), uint64(1); sequence <= 10; sequence++ {
				if credit == 0 {
					command, err := s.Recv()
					if err != nil {
						return err
					}
					credit += command.GetCredit().GetNumCreditTokens()
				}
				credit--
				if err := answer(s, submit.GetKey(), tokens(sequence, "x")); err != nil {
					return err
				}
			}
			return answer(s, submit.GetKey(), finished(11))
		},
	})
	text, err := textOf(share(ctx, t, client, config).Generate(ctx, &pb.GenerateRequest{}))
	if len(text) != 10 || err != nil {
		t.Errorf("%q, %v", text, err)
	}
}

func TestDeadlineAndTraceTravelInTheSubmit(t *testing.T) {
	trace := NewTraceContext()
	got := make(chan *pb.MultiplexSubmit, 1)
	ctx, client := serve(t, &fakeService{
		multiplex: func(s pb.GenerationService_MultiplexServer) error {
			if md, _ := metadata.FromIncomingContext(s.Context()); len(md.Get("traceparent")) > 0 {
				return errors.New("the trace of a request is not that of the call")
			}
			command, err := s.Recv()
			if err != nil {
				return err
			}
			got <- command.GetSubmit()
			return answer(s, command.GetSubmit().GetKey(), accepted("a"), finished(1))
		},
	})
	shared := share(context.Background(), t, client, DefaultMultiplex())
	stream := shared.Generate(ContextWithTrace(ctx, trace), &pb.GenerateRequest{})
	if _, err := textOf(stream); err != nil {
		t.Fatal(err)
	}
	submit := <-got
	deadline := submit.GetGeneration().GetScheduling().GetTotalTimeout().AsDuration()
	if deadline <= 0 || deadline > testTimeout {
		t.Errorf("total_timeout is %v", deadline)
	}
	if submit.GetTraceparent() != trace.Traceparent {
		t.Errorf("traceparent is %q", submit.GetTraceparent())
	}
}

func TestContextCancelsItsRequestAlone(t *testing.T) {
	cancelled := make(chan uint64, 1)
	ctx, client := serve(t, &fakeService{
		multiplex: func(s pb.GenerationService_MultiplexServer) error {
			for {
				command, err := s.Recv()
				if err != nil {
					return err
				}
				if submit := command.GetSubmit(); submit != nil {
					if err := answer(s, submit.GetKey(), accepted("a")); err != nil {
						return err
					}
				}
				if cancel := command.GetCancel(); cancel != nil {
					cancelled <- cancel.GetKey()
					// The abandoned request ends as well as the other one.
					if err := answer(s, cancel.GetKey(), finished(1)); err != nil {
						return err
					}
					if err := answer(s, 1, finished(1)); err != nil {
						return err
					}
				}
			}
		},
	})
	shared := share(ctx, t, client, DefaultMultiplex())
	kept := shared.Generate(ctx, &pb.GenerateRequest{})
	if !kept.Next() {
		t.Fatal(kept.Err())
	}
	one, cancel := context.WithCancel(ctx)
	left := shared.Generate(one, &pb.GenerateRequest{})
	if !left.Next() {
		t.Fatal(left.Err())
	}
	cancel()
	if left.Next() || !errors.Is(left.Err(), context.Canceled) {
		t.Errorf("it ended with %v", left.Err())
	}
	if key := <-cancelled; key != 2 {
		t.Errorf("request %d was cancelled", key)
	}
	if _, err := textOf(kept); err != nil {
		t.Errorf("the other one ended with %v", err)
	}
}

func TestLostCallIsReplaced(t *testing.T) {
	numCalls := 0
	ctx, client := serve(t, &fakeService{
		multiplex: func(s pb.GenerationService_MultiplexServer) error {
			command, err := s.Recv()
			if err != nil {
				return err
			}
			if numCalls++; numCalls == 1 {
				return status.Error(codes.Unavailable, "gone")
			}
			key := command.GetSubmit().GetKey()
			return answer(s, key, accepted("a"), tokens(1, "x"), finished(2))
		},
	}, WithRetry(RetryPolicy{MaxAttempts: 2, Multiplier: 1}))
	shared := share(ctx, t, client, DefaultMultiplex())
	if text, err := textOf(shared.Generate(ctx, &pb.GenerateRequest{})); text != "x" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
}

func TestOldCallEndsWithItsLastRequest(t *testing.T) {
	config := DefaultMultiplex()
	config.MaxCallAge = time.Nanosecond // so each request has a separate call
	ends := make(chan error, 2)
	ctx, client := serve(t, &fakeService{
		multiplex: func(s pb.GenerationService_MultiplexServer) error {
			command, err := s.Recv()
			if err != nil {
				return err
			}
			key := command.GetSubmit().GetKey()
			if err := answer(s, key, accepted("a"), finished(1)); err != nil {
				return err
			}
			_, err = s.Recv() // io.EOF: the client has closed its sending side
			ends <- err
			return nil
		},
	})
	shared := share(ctx, t, client, config)
	for i := 0; i < 2; i++ {
		if _, err := textOf(shared.Generate(ctx, &pb.GenerateRequest{})); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-ends; !errors.Is(err, io.EOF) {
		t.Errorf("the old call was cut: %v", err)
	}
}

func TestClosedMultiplexReturnsItsError(t *testing.T) {
	ctx, client := serve(t, &fakeService{})
	shared := share(ctx, t, client, DefaultMultiplex())
	if err := shared.Close(); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 20; i++ {
		_, err := textOf(shared.Generate(ctx, &pb.GenerateRequest{}))
		if status.Code(err) != codes.Canceled {
			t.Errorf("it ended with %v", err)
		}
	}
}

func TestTooLargeRequestFailsAlone(t *testing.T) {
	ctx, client := serve(t, &fakeService{})
	config := DefaultMultiplex()
	config.MaxRequestBytes = 100
	request := &pb.GenerateRequest{Prompt: &pb.GenerateRequest_TextPrompt{
		TextPrompt: &pb.TextPrompt{Text: string(make([]byte, 100))},
	}}
	_, err := textOf(share(ctx, t, client, config).Generate(ctx, request))
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("it ended with %v", err)
	}
}

func TestWhatIsNotUTF8FailsAlone(t *testing.T) {
	ctx, client := serve(t, &fakeService{
		multiplex: func(s pb.GenerationService_MultiplexServer) error {
			for key := uint64(1); ; key++ {
				command, err := s.Recv()
				if err != nil {
					return err
				}
				if got := command.GetSubmit().GetKey(); got != key {
					return fmt.Errorf("request %d was submitted, not %d", got, key)
				}
				if err := answer(s, key, accepted("a")); err != nil {
					return err
				}
				if key == 1 {
					continue
				}
				// The second request to arrive ends both.
				for _, each := range []uint64{1, 2} {
					if err := answer(s, each, finished(1)); err != nil {
						return err
					}
				}
			}
		},
	}, WithRetry(NoRetry()))
	shared := share(ctx, t, client, DefaultMultiplex())
	neighbour := shared.Generate(ctx, &pb.GenerateRequest{})
	if !neighbour.Next() {
		t.Fatal(neighbour.Err())
	}
	_, err := textOf(shared.Generate(ctx, notUnicode()))
	requireNotUnicode(t, err)
	trace := ContextWithTrace(ctx, TraceContext{Traceparent: "\xff"})
	_, err = textOf(shared.Generate(trace, &pb.GenerateRequest{}))
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("a trace that is not UTF-8: %v", err)
	}
	for _, stream := range []*Stream{shared.Generate(ctx, &pb.GenerateRequest{}), neighbour} {
		if _, err := textOf(stream); err != nil {
			t.Errorf("the neighbour ended with %v", err)
		}
	}
}
