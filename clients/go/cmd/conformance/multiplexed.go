package main

import (
	"context"
	"fmt"

	"penstock"
	pb "penstock/v1"
)

func multiplex(ctx context.Context, t *talk) error {
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
		sixTexts, oneRefused, oneCancelled, oneOnCredit,
	} {
		if err := part(ctx, client, shared); err != nil {
			return err
		}
	}
	return nil
}

// sixTexts: six at once have the texts that they have alone.
func sixTexts(ctx context.Context, client *penstock.Client, shared *penstock.Multiplex) error {
	const num = 6
	request := func(i int) *pb.GenerateRequest {
		return greedyAfter(fmt.Sprintf("%s, number %d", prompt, i), 24)
	}
	var all [num]*heard
	for i := range all {
		all[i] = hear(shared.Generate(ctx, request(i)))
		// The queue has four places and is emptied once in a step.
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

// oneRefused: one is refused, and the one next to it continues.
func oneRefused(ctx context.Context, _ *penstock.Client, shared *penstock.Multiplex) error {
	beside := hear(shared.Generate(ctx, greedy(50)))
	if err := beside.untilTokens(1); err != nil {
		return err
	}
	if err := refusedTemperature(hear(shared.Generate(ctx, tooCold()))); err != nil {
		return err
	}
	return beside.untilWhole(50)
}

// oneCancelled: a long one ends well when it is cancelled.
func oneCancelled(ctx context.Context, _ *penstock.Client, shared *penstock.Multiplex) error {
	h := hear(shared.Generate(ctx, greedy(longTokens)))
	if err := h.untilTokens(1); err != nil {
		return err
	}
	if err := h.stream.Cancel(ctx); err != nil {
		return err
	}
	return h.untilReason(pb.FinishReason_FINISH_REASON_CANCELLED)
}

// oneOnCredit: output stops where its credit ends.
func oneOnCredit(ctx context.Context, _ *penstock.Client, shared *penstock.Multiplex) error {
	const credit, num = 5, 20
	h := hear(shared.GenerateWithCredit(ctx, greedy(num), credit))
	if err := h.untilTokens(credit); err != nil {
		return err
	}
	further := make(chan error, 1)
	go func() { further <- h.untilTokens(credit + 1) }()
	// By the time that a longer one has ended next to it, it has come to its own end on the server.
	if err := hear(shared.Generate(ctx, greedy(3*num))).untilWhole(3 * num); err != nil {
		return err
	}
	select {
	case err := <-further:
		return fmt.Errorf("it went on without credit, to %d tokens: %v", h.numTokens, err)
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
