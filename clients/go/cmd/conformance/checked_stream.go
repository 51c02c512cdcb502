package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"

	"penstock"
	pb "penstock/v1"
)

const (
	prompt     = "The old lighthouse keeper climbed the stairs"
	longTokens = 10_000
)

var numIDs = time.Now().UnixNano()

// newID returns a unique request id.
func newID() string {
	numIDs++
	return fmt.Sprintf("conformance-go-%d", numIDs)
}

// greedy requests exactly num tokens, which depend only on the prompt.
func greedy(num uint32) *pb.GenerateRequest { return greedyAfter(prompt, num) }

func greedyAfter(text string, num uint32) *pb.GenerateRequest {
	var temperature float32
	return &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_TextPrompt{TextPrompt: &pb.TextPrompt{Text: text}},
		Sampling: &pb.SamplingOptions{Temperature: &temperature},
		Stopping: &pb.StoppingOptions{MaxTokens: &num, IgnoreEos: true},
	}
}

// ofIDs replaces the prompt of a request by token ids.
func ofIDs(request *pb.GenerateRequest, ids []uint32) *pb.GenerateRequest {
	request.Prompt = &pb.GenerateRequest_TokenPrompt{TokenPrompt: &pb.TokenPrompt{Ids: ids}}
	return request
}

func named(request *pb.GenerateRequest, id string) *pb.GenerateRequest {
	request.RequestId = &id
	return request
}

// dial returns a client without retries.
func dial(t *scenarioInput) (*penstock.Client, error) {
	return penstock.Dial(t.address, penstock.WithRetry(penstock.NoRetry()))
}

// onceText returns the text of GenerateOnce.
func onceText(
	ctx context.Context, client *penstock.Client, request *pb.GenerateRequest,
) (string, error) {
	once, err := client.GenerateOnce(ctx, request)
	if err != nil {
		return "", fmt.Errorf("GenerateOnce: %w", err)
	}
	if len(once.GetOutputs()) != 1 || once.GetOutputs()[0].GetText() == "" {
		return "", fmt.Errorf("GenerateOnce has no text: %v", once)
	}
	return once.GetOutputs()[0].GetText(), nil
}

// checkedStream reads a stream and checks the order of its messages, in addition to the client,
// which is under test.
type checkedStream struct {
	stream    *penstock.Stream
	next      uint64
	accepted  *pb.RequestAccepted
	finished  *pb.RequestFinished
	echo      strings.Builder
	text      strings.Builder
	ids       []uint32
	numTokens uint32
	numChunks int
}

func checkStream(stream *penstock.Stream) *checkedStream { return &checkedStream{stream: stream} }

func (h *checkedStream) read() error {
	if !h.stream.Next() {
		if err := h.stream.Err(); err != nil {
			return err
		}
		return errors.New("the stream ended without finished")
	}
	response := h.stream.Response()
	if response.GetSequence() != h.next {
		return fmt.Errorf("sequence %d, not %d", response.GetSequence(), h.next)
	}
	h.next++
	if (response.GetSequence() == 0) != (response.GetAccepted() != nil) {
		return fmt.Errorf("message %d is %v", response.GetSequence(), response)
	}
	switch event := response.GetEvent().(type) {
	case *pb.GenerateResponse_Accepted:
		h.accepted = event.Accepted
	case *pb.GenerateResponse_Prompt:
		h.echo.WriteString(event.Prompt.GetText())
	case *pb.GenerateResponse_Tokens:
		return h.receiveTokens(event.Tokens)
	case *pb.GenerateResponse_Finished:
		h.finished = event.Finished
	}
	return nil
}

func (h *checkedStream) receiveTokens(tokens *pb.TokenDelta) error {
	if !utf8.ValidString(tokens.GetText()) {
		return fmt.Errorf("chunk %d is no UTF-8: %q", h.numChunks, tokens.GetText())
	}
	h.text.WriteString(tokens.GetText())
	h.numTokens += tokens.GetNumTokens()
	h.numChunks++
	for _, record := range tokens.GetRecords() {
		h.ids = append(h.ids, record.GetId())
	}
	return nil
}

func (h *checkedStream) untilAccepted() error {
	for h.accepted == nil {
		if err := h.read(); err != nil {
			return err
		}
	}
	return nil
}

func (h *checkedStream) untilTokens(num uint32) error {
	for h.numTokens < num {
		if h.finished != nil {
			return fmt.Errorf("finished after %d tokens, not %d", h.numTokens, num)
		}
		if err := h.read(); err != nil {
			return err
		}
	}
	return nil
}

// untilEnd reads to the end of the stream, past the last message.
func (h *checkedStream) untilEnd() error {
	for h.finished == nil {
		if err := h.read(); err != nil {
			return err
		}
	}
	if h.stream.Next() {
		return fmt.Errorf("a message after finished: %v", h.stream.Response())
	}
	return h.stream.Err()
}

// untilReason reads to the end, which must have this finish reason.
func (h *checkedStream) untilReason(reason pb.FinishReason) error {
	if err := h.untilEnd(); err != nil {
		return err
	}
	outputs := h.finished.GetOutputs()
	if len(outputs) != 1 || outputs[0].GetFinishReason() != reason {
		return fmt.Errorf("ended with %v, not %v", outputs, reason)
	}
	return nil
}

// untilWhole reads to the end, which must follow exactly num tokens.
func (h *checkedStream) untilWhole(num uint32) error {
	if err := h.untilReason(pb.FinishReason_FINISH_REASON_LENGTH); err != nil {
		return err
	}
	reported := h.finished.GetUsage().GetNumCompletionTokens()
	if h.numTokens != num || reported != num {
		return fmt.Errorf("%d tokens came and usage reports %d, not %d", h.numTokens, reported, num)
	}
	return nil
}

// failure reads a stream that must fail with this code, and with this reason if one is given.
func (h *checkedStream) failure(code codes.Code, reason string) (*penstock.Error, error) {
	var err error
	for err == nil {
		err = h.read()
		if h.finished != nil {
			return nil, fmt.Errorf("it was served, not rejected with %v", code)
		}
	}
	return asFailure(err, code, reason)
}

func asFailure(err error, code codes.Code, reason string) (*penstock.Error, error) {
	var failed *penstock.Error
	if !errors.As(err, &failed) {
		return nil, fmt.Errorf("no penstock.Error: %v", err)
	}
	if failed.Code != code || (reason != "" && failed.Reason != reason) {
		return nil, fmt.Errorf("it failed with %v, not %v %s", failed, code, reason)
	}
	return failed, nil
}

func same(got, wanted, what string) error {
	if got != wanted {
		return fmt.Errorf("%s is %q, not %q", what, got, wanted)
	}
	return nil
}
