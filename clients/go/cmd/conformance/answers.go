package main

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"penstock"
	pb "penstock/v1"
)

const numLargeTokens = 100_000

func streamInOrder(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	h := checkStream(client.Generate(ctx, greedy(12)))
	if err := h.untilWhole(12); err != nil {
		return err
	}
	if h.accepted.GetRequestId() == "" || h.accepted.GetModel() == "" {
		return fmt.Errorf("accepted without names: %v", h.accepted)
	}
	return nil
}

func onceEqualsStream(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	h := checkStream(client.Generate(ctx, greedy(32)))
	if err := h.untilWhole(32); err != nil {
		return err
	}
	text, err := onceText(ctx, client, greedy(32))
	if err != nil {
		return err
	}
	return same(h.text.String(), text, "the text of the stream")
}

func tokenPrompt(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	ids := []uint32{5, 6, 7, 8, 9, 10, 11, 12}
	var first []uint32
	for i := 0; i < 2; i++ {
		request := ofIDs(greedy(12), ids)
		request.Output = &pb.OutputOptions{ReturnTokenIds: true}
		h := checkStream(client.Generate(ctx, request))
		if err := h.untilWhole(12); err != nil {
			return err
		}
		if len(h.ids) != 12 {
			return fmt.Errorf("%d token ids, not 12", len(h.ids))
		}
		if reported := h.finished.GetUsage().GetNumPromptTokens(); int(reported) != len(ids) {
			return fmt.Errorf("usage reports %d prompt tokens, not %d", reported, len(ids))
		}
		if i == 0 {
			first = h.ids
		} else if !reflect.DeepEqual(h.ids, first) {
			return fmt.Errorf("%v the first time, %v the second", first, h.ids)
		}
	}
	return nil
}

func chat(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	request := greedy(24)
	request.Prompt = &pb.GenerateRequest_ChatPrompt{ChatPrompt: &pb.ChatPrompt{Messages: []*pb.ChatMessage{
		{Role: "system", Parts: []*pb.ContentPart{textPart("You answer in one sentence.")}},
		{Role: "user", Parts: []*pb.ContentPart{textPart("Where is the Globe?")}},
	}}}
	h := checkStream(client.Generate(ctx, request))
	if err := h.untilWhole(24); err != nil {
		return err
	}
	if h.text.Len() == 0 {
		return errors.New("there is no text")
	}
	return nil
}

func textPart(text string) *pb.ContentPart {
	return &pb.ContentPart{Content: &pb.ContentPart_Text{Text: text}}
}

func utf8AcrossChunks(ctx context.Context, t *scenarioInput) error {
	const text = "naïve 日本語 🚀"
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	chunk := uint32(1)
	request := greedyAfter(text, 200)
	request.Output = &pb.OutputOptions{Echo: true, MinChunkTokens: &chunk}
	h := checkStream(client.Generate(ctx, request))
	if err := h.untilWhole(200); err != nil {
		return err
	}
	if err := same(h.echo.String(), text, "the echoed prompt"); err != nil {
		return err
	}
	once, err := onceText(ctx, client, greedyAfter(text, 200))
	if err != nil {
		return err
	}
	isBeyondASCII := func(r rune) bool { return r > 0x7f }
	if strings.IndexFunc(once, isBeyondASCII) < 0 {
		return errors.New("the text has no character beyond ASCII")
	}
	return same(h.text.String(), once, "the text of the stream")
}

func largePrompt(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	ids := make([]uint32, numLargeTokens)
	for i := range ids {
		ids[i] = uint32(5 + i%1000)
	}
	h := checkStream(client.Generate(ctx, ofIDs(greedy(4), ids)))
	if err := h.untilWhole(4); err != nil {
		return err
	}
	if reported := h.finished.GetUsage().GetNumPromptTokens(); reported != numLargeTokens {
		return fmt.Errorf("usage reports %d prompt tokens, not %d", reported, numLargeTokens)
	}
	return nil
}

func traceMetadata(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	trace, id := penstock.NewTraceContext(), newID()
	stream := client.Generate(penstock.ContextWithTrace(ctx, trace), named(greedy(4), id))
	h := checkStream(stream)
	if err := h.untilWhole(4); err != nil {
		return err
	}
	traceID := strings.Split(trace.Traceparent, "-")[1]
	if err := same(h.accepted.GetTraceId(), traceID, "the trace id in accepted"); err != nil {
		return err
	}
	return same(h.accepted.GetRequestId(), id, "the request id in accepted")
}
