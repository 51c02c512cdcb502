package main

import (
	"context"
	"fmt"

	"penstock"
	pb "penstock/v1"
)

func multiplex(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	shared, err := client.Multiplex(ctx, penstock.DefaultMultiplex())
	if err != nil {
		return err
	}
	defer shared.Close()
	for _, part := range []func(context.Context, *penstock.Client, *penstock.Multiplex) error{
		sixTexts, oneRejected, oneCancelled, oneOnCredit,
	} {
		if err := part(ctx, client, shared); err != nil {
			return err
		}
	}
	return nil
}

// sixTexts checks that six concurrent requests have the same texts as separate ones.
func sixTexts(ctx context.Context, client *penstock.Client, shared *penstock.Multiplex) error {
	const num = 6
	request := func(i int) *pb.GenerateRequest {
		return greedyAfter(fmt.Sprintf("%s, number %d", prompt, i), 24)
	}
	var all [num]*checkedStream
	for i := range all {
		all[i] = checkStream(shared.Generate(ctx, request(i)))
		// The queue holds four requests and is emptied once per step.
		if err := all[i].untilAccepted(); err != nil {
			return fmt.Errorf("request %d: %w", i+1, err)
		}
	}
	for i, h := range all {
		if err := h.untilWhole(24); err != nil {
			return fmt.Errorf("request %d: %w", i+1, err)
		}
		text, err := onceText(ctx, client, request(i))
		if err != nil {
			return err
		}
		if err := same(h.text.String(), text, fmt.Sprintf("text %d", i+1)); err != nil {
			return err
		}
	}
	return nil
}

// oneRejected checks that one request is rejected, and that a concurrent one continues.
func oneRejected(ctx context.Context, _ *penstock.Client, shared *penstock.Multiplex) error {
	other := checkStream(shared.Generate(ctx, greedy(50)))
	if err := other.untilTokens(1); err != nil {
		return err
	}
	if err := rejectedTemperature(checkStream(shared.Generate(ctx, tooCold()))); err != nil {
		return err
	}
	return other.untilWhole(50)
}

// oneCancelled checks that a long request that is cancelled ends without an error.
func oneCancelled(ctx context.Context, _ *penstock.Client, shared *penstock.Multiplex) error {
	h := checkStream(shared.Generate(ctx, greedy(longTokens)))
	if err := h.untilTokens(1); err != nil {
		return err
	}
	if err := h.stream.Cancel(ctx); err != nil {
		return err
	}
	return h.untilReason(pb.FinishReason_FINISH_REASON_CANCELLED)
}

// oneOnCredit checks that the output stops when the credit is used up.
func oneOnCredit(ctx context.Context, _ *penstock.Client, shared *penstock.Multiplex) error {
	const credit, num = 5, 20
	h := checkStream(shared.GenerateWithCredit(ctx, greedy(num), credit))
	if err := h.untilTokens(credit); err != nil {
		return err
	}
	further := make(chan error, 1)
	go func() { further <- h.untilTokens(credit + 1) }()
	// When a longer concurrent request has ended, this one has had the time to end on the server.
	if err := checkStream(shared.Generate(ctx, greedy(3*num))).untilWhole(3 * num); err != nil {
		return err
	}
	select {
	case err := <-further:
		return fmt.Errorf("it continued without credit, to %d tokens: %v", h.numTokens, err)
	default:
	}
	if err := h.stream.Grant(ctx, num); err != nil {
		return err
	}
	if err := <-further; err != nil {
		return err
	}
	return h.untilWhole(num)
}
