package main

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "penstock/v1"
)

func cancelAfterFirstToken(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	id := newID()
	callCtx, cancel := context.WithCancel(ctx)
	h := checkStream(client.Generate(callCtx, named(greedy(longTokens), id)))
	if err := h.untilTokens(1); err != nil {
		cancel()
		return err
	}
	cancel()
	if _, err := h.failure(codes.Canceled, ""); err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, 20*time.Second)
	defer stop()
	// The id of a request can be used again when the request has ended.
	for {
		err := checkStream(client.Generate(ctx, named(greedy(1), id))).untilWhole(1)
		if err == nil {
			return nil
		}
		if _, err := asFailure(err, codes.AlreadyExists, "REQUEST_ID_IN_USE"); err != nil {
			return err
		}
	}
}

func cancelByID(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	other, err := dial(t)
	if err != nil {
		return err
	}
	defer other.Close()
	id := newID()
	h := checkStream(client.Generate(ctx, named(greedy(longTokens), id)))
	if err := h.untilTokens(1); err != nil {
		return err
	}
	if _, err := other.Cancel(ctx, id); err != nil {
		return err
	}
	return h.untilReason(pb.FinishReason_FINISH_REASON_CANCELLED)
}

func resume(ctx context.Context, t *scenarioInput) error {
	const num = 200
	client, err := dial(t)
	if err != nil {
		return err
	}
	request := greedy(num)
	request.ResumeTimeout = durationpb.New(30 * time.Second)
	before := checkStream(client.Generate(ctx, request))
	if err := before.untilTokens(20); err != nil {
		_ = client.Close()
		return err
	}
	if err := client.Close(); err != nil {
		return err
	}
	if _, err := before.failure(codes.Canceled, ""); err != nil {
		return err
	}
	// Compute it after the last message, because messages that arrived before the failure count
	// too.
	point := before.stream.Point()
	client, err = dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	after := &checkedStream{stream: client.Resume(ctx, point), next: point.NextSequence}
	if err := after.untilReason(pb.FinishReason_FINISH_REASON_LENGTH); err != nil {
		return err
	}
	if total := before.numTokens + after.numTokens; total != num {
		return fmt.Errorf("%d tokens, not %d", total, num)
	}
	text, err := onceText(ctx, client, greedy(num))
	if err != nil {
		return err
	}
	return same(before.text.String()+after.text.String(), text, "the text of both streams")
}

func engineKilled(ctx context.Context, t *scenarioInput) error {
	const num = 400
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	h := checkStream(client.Generate(ctx, greedy(num)))
	if err := h.untilTokens(1); err != nil {
		return err
	}
	t.ready()
	if err := h.untilWhole(num); err != nil {
		return err
	}
	text, err := onceText(ctx, client, greedy(num))
	if err != nil {
		return err
	}
	return same(h.text.String(), text, "the text of the stream")
}

func drain(ctx context.Context, t *scenarioInput) error {
	const num = 300
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	running := checkStream(client.Generate(ctx, greedy(num)))
	if err := running.untilTokens(1); err != nil {
		return err
	}
	if err := t.untilGo(ctx); err != nil {
		return err
	}
	failed, err := checkStream(client.Generate(ctx, greedy(4))).failure(codes.Unavailable, "")
	if err != nil {
		return err
	}
	if failed.Reason != "" && !failed.HasReason(pb.ErrorReason_ERROR_REASON_DRAINING) {
		return fmt.Errorf("it was rejected with %v", failed)
	}
	return running.untilWhole(num)
}
