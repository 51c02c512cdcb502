// The conformance program of the Go client. It reads names of scenarios from stdin, one per line,
// and writes one line of JSON for each. The scenarios are in the other files of this folder.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

const scenarioTimeout = 60 * time.Second

// line is one line of the output.
type line struct {
	Scenario string `json:"scenario"`
	Event    string `json:"event,omitempty"`
	Outcome  string `json:"outcome,omitempty"`
	Why      string `json:"why,omitempty"`
}

func writeLine(l line) {
	text, err := json.Marshal(l)
	if err != nil {
		panic(err) // strings can always be marshalled
	}
	fmt.Println(string(text))
}

// scenarioInput is passed to each scenario.
type scenarioInput struct {
	address string
	name    string
	lines   <-chan string
}

func (t *scenarioInput) ready() { writeLine(line{Scenario: t.name, Event: "ready"}) }

// untilGo reports to the driver that the scenario is ready, and waits for the command to continue.
func (t *scenarioInput) untilGo(ctx context.Context) error {
	t.ready()
	select {
	case word := <-t.lines:
		if word != "go" {
			return fmt.Errorf("expected go, not %q", word)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

type scenario func(ctx context.Context, t *scenarioInput) error

func scenarios() map[string]scenario {
	return map[string]scenario{
		"stream_in_order":          streamInOrder,
		"once_equals_stream":       onceEqualsStream,
		"token_prompt":             tokenPrompt,
		"chat":                     chat,
		"utf8_across_chunks":       utf8AcrossChunks,
		"large_prompt":             largePrompt,
		"invalid_field":            invalidField,
		"unknown_model":            unknownModel,
		"unimplemented_feature":    unimplementedFeature,
		"duplicate_request_id":     duplicateRequestID,
		"cancel_after_first_token": cancelAfterFirstToken,
		"cancel_by_id":             cancelByID,
		"deadline":                 deadline,
		"queue_full":               queueFull,
		"metadata":                 traceMetadata,
		"multiplex":                multiplex,
		"resume":                   resume,
		"retry_after_rejection":    retryAfterRejection,
		"engine_killed":            engineKilled,
		"drain":                    drain,
	}
}

func outcome(t *scenarioInput) line {
	run, ok := scenarios()[t.name]
	if !ok {
		return line{Scenario: t.name, Outcome: "failed", Why: "no such scenario"}
	}
	ctx, cancel := context.WithTimeout(context.Background(), scenarioTimeout)
	defer cancel()
	result := make(chan error, 1)
	go func() { result <- run(ctx, t) }()
	var err error
	select {
	case err = <-result:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
		err = fmt.Errorf("not done within %v: %w", scenarioTimeout, err)
	}
	if err != nil {
		return line{Scenario: t.name, Outcome: "failed", Why: err.Error()}
	}
	return line{Scenario: t.name, Outcome: "passed"}
}

func main() {
	address := flag.String("address", "", "HOST:PORT of the service")
	flag.Parse()
	if *address == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for scanner := bufio.NewScanner(os.Stdin); scanner.Scan(); {
			lines <- strings.TrimSpace(scanner.Text())
		}
	}()
	for word := range lines {
		if moved := strings.TrimPrefix(word, "address "); moved != word {
			*address = strings.TrimSpace(moved)
		} else if word != "" {
			writeLine(outcome(&scenarioInput{address: *address, name: word, lines: lines}))
		}
	}
}
