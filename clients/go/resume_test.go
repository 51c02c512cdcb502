package penstock

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "penstock/v1"
)

func resumable() *pb.GenerateRequest {
	return &pb.GenerateRequest{ResumeTimeout: durationpb.New(testTimeout)}
}

// loseAfterOne delivers a token and then loses the connection.
func loseAfterOne(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
	if err := sendAll(s.Send, accepted("a"), tokens(1, "x")); err != nil {
		return err
	}
	return status.Error(codes.Unavailable, "gone")
}

func resumed(s pb.GenerationService_ResumeServer, messages ...*pb.GenerateResponse) error {
	return sendAll(func(message *pb.GenerateResponse) error {
		return s.Send(&pb.ResumeResponse{Response: message})
	}, messages...)
}

func TestLostStreamIsResumed(t *testing.T) {
	numResumed := 0
	ctx, client := serve(t, &fakeService{
		generate: loseAfterOne,
		resume: func(r *pb.ResumeRequest, s pb.GenerationService_ResumeServer) error {
			if numResumed++; numResumed == 1 {
				return status.Error(codes.Unavailable, "still gone")
			}
			if r.GetRequestId() != "a" || r.GetNextSequence() != 2 ||
				len(r.GetReceivedTokenCounts()) != 1 || r.GetReceivedTokenCounts()[0] != 1 {
				return status.Errorf(codes.InvalidArgument, "asked for %v", r)
			}
			return resumed(s, tokens(2, "y"), finished(3))
		},
	})
	text, err := textOf(client.Generate(ctx, resumable()))
	if text != "xy" || err != nil || numResumed != 2 {
		t.Errorf("%q, %v after %d attempts", text, err, numResumed)
	}
}

func TestAFinishWhoseStatusWasLostIsReadAgain(t *testing.T) {
	ctx, client := serve(t, &fakeService{
		generate: func(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
			if err := sendAll(s.Send, accepted("a"), tokens(1, "x"), finished(2)); err != nil {
				return err
			}
			return status.Error(codes.Unavailable, "gone")
		},
		resume: func(r *pb.ResumeRequest, s pb.GenerationService_ResumeServer) error {
			return resumed(s, finished(r.GetNextSequence()))
		},
	})
	stream := client.Generate(ctx, resumable())
	if text, err := textOf(stream); text != "x" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if point := stream.Point(); point.NextSequence != 3 {
		t.Errorf("the point is %v", point)
	}
}

func TestLossIsReportedWhenTheRequestIsForgotten(t *testing.T) {
	ctx, client := serve(t, &fakeService{
		generate: loseAfterOne,
		resume: func(*pb.ResumeRequest, pb.GenerationService_ResumeServer) error {
			return rejection(t, codes.NotFound, "REQUEST_NOT_FOUND", 0)
		},
	})
	if _, err := textOf(client.Generate(ctx, resumable())); status.Code(err) != codes.Unavailable {
		t.Errorf("the error is %v", err)
	}
}

func TestResumeFromAPoint(t *testing.T) {
	ctx, client := serve(t, &fakeService{
		resume: func(r *pb.ResumeRequest, s pb.GenerationService_ResumeServer) error {
			return resumed(s, tokens(r.GetNextSequence(), "y"), finished(r.GetNextSequence()+1))
		},
	})
	stream := client.Resume(ctx, ResumePoint{RequestID: "a", NextSequence: 7})
	if text, err := textOf(stream); text != "y" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if point := stream.Point(); point.NextSequence != 9 || point.ReceivedTokenCounts[0] != 1 {
		t.Errorf("the point is %v", point)
	}
}

func TestLeavingCancelsARequestThatWouldContinue(t *testing.T) {
	cancelled := make(chan string, 1)
	service := &fakeService{
		generate: func(_ *pb.GenerateRequest, s pb.GenerationService_GenerateServer) error {
			if err := sendAll(s.Send, accepted("a")); err != nil {
				return err
			}
			<-s.Context().Done()
			return s.Context().Err()
		},
		cancel: func(r *pb.CancelRequest) (*pb.CancelResponse, error) {
			cancelled <- r.GetRequestId()
			return &pb.CancelResponse{}, nil
		},
	}
	ctx, client := serve(t, service)
	detached := client.Generate(ctx, resumable())
	if !detached.Next() {
		t.Fatal(detached.Err())
	}
	detached.Detach()
	left := client.Generate(ctx, resumable())
	if !left.Next() {
		t.Fatal(left.Err())
	}
	if err := left.Close(); err != nil {
		t.Fatal(err)
	}
	if left.Next() || status.Code(left.Err()) != codes.Canceled {
		t.Errorf("a stream that was left ended with %v", left.Err())
	}
	if err := client.Close(); err != nil { // which waits for the Cancel call of the closed stream
		t.Fatal(err)
	}
	if len(cancelled) != 1 {
		t.Errorf("%d requests were cancelled, not 1", len(cancelled))
	}
}

func TestResumeTimeoutEnds(t *testing.T) {
	lost := &Error{Code: codes.Unavailable}
	point := ResumePoint{RequestID: "a", NextSequence: 2}
	r := recovery{resumeTimeout: time.Hour}
	if _, ok := r.delayAfter(lost, point); !ok {
		t.Fatal("a lost stream is not resumed")
	}
	r.lostAt = r.lostAt.Add(-2 * time.Hour)
	if _, ok := r.delayAfter(lost, point); ok {
		t.Error("it is resumed after its resume timeout")
	}
	point.NextSequence++
	if _, ok := r.delayAfter(lost, point); !ok {
		t.Error("a stream that has made progress has no new resume timeout")
	}
	down := &Error{Code: codes.Unavailable, Reason: "ENGINE_DOWN"}
	point.NextSequence++
	if _, ok := r.delayAfter(down, point); ok {
		t.Error("a request that failed with its engine is resumed")
	}
}
