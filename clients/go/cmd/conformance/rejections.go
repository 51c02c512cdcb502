package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	"penstock"
	pb "penstock/v1"
)

func invalidField(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	return rejectedTemperature(checkStream(client.Generate(ctx, tooCold())))
}

// tooCold is a request that is rejected because of its temperature.
func tooCold() *pb.GenerateRequest {
	request, temperature := greedy(4), float32(-1)
	request.Sampling.Temperature = &temperature
	return request
}

func rejectedTemperature(h *checkedStream) error {
	failed, err := h.failure(codes.InvalidArgument, "INVALID_ARGUMENT")
	if err != nil {
		return err
	}
	for _, violation := range failed.FieldViolations {
		if violation.Field == "sampling.temperature" && violation.Description != "" {
			return nil
		}
	}
	return fmt.Errorf("the violations are %v", failed.FieldViolations)
}

func unknownModel(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	request, model := greedy(4), "no-such-model"
	request.Model = &model
	_, err = checkStream(client.Generate(ctx, request)).failure(codes.NotFound, "MODEL_NOT_FOUND")
	return err
}

func unimplementedFeature(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	request := greedy(4)
	request.Stopping.IgnoreEos = false
	request.Constraint = &pb.OutputConstraint{Kind: &pb.OutputConstraint_JsonSchema{
		JsonSchema: &pb.JsonSchemaConstraint{Schema: `{"type": "object"}`},
	}}
	h := checkStream(client.Generate(ctx, request))
	failed, err := h.failure(codes.Unimplemented, "FEATURE_UNSUPPORTED")
	if err != nil {
		return err
	}
	return same(failed.Metadata["feature"], "json_schema", "the feature named")
}

func duplicateRequestID(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	id := newID()
	first := checkStream(client.Generate(ctx, named(greedy(100), id)))
	if err := first.untilTokens(1); err != nil {
		return err
	}
	second := checkStream(client.Generate(ctx, named(greedy(4), id)))
	if _, err := second.failure(codes.AlreadyExists, "REQUEST_ID_IN_USE"); err != nil {
		return err
	}
	return first.untilWhole(100)
}

// fill occupies the service with requests of num tokens: four that run and four that wait.
func fill(ctx context.Context, client *penstock.Client, num uint32) ([]*checkedStream, error) {
	var all []*checkedStream
	for i := 0; i < 8; i++ {
		h := checkStream(client.Generate(ctx, named(greedy(num), newID())))
		all = append(all, h)
		if err := h.untilAccepted(); err != nil {
			return nil, fmt.Errorf("request %d of 8: %w", i+1, err)
		}
		// Submitted one by one, so that the first four run.
		if i < 4 {
			if err := h.untilTokens(1); err != nil {
				return nil, fmt.Errorf("request %d of 8: %w", i+1, err)
			}
		}
	}
	return all, nil
}

func cancelAll(ctx context.Context, all []*checkedStream) error {
	// In reverse order, so that no waiting request starts to run in place of a cancelled one.
	for i := len(all) - 1; i >= 0; i-- {
		if err := all[i].stream.Cancel(ctx); err != nil {
			return err
		}
	}
	for _, h := range all {
		if err := h.untilEnd(); err != nil {
			return err
		}
	}
	return nil
}

func queueFull(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	blockers, err := fill(ctx, client, longTokens)
	if err != nil {
		return err
	}
	ninth := checkStream(client.Generate(ctx, greedy(4)))
	failed, err := ninth.failure(codes.ResourceExhausted, "QUEUE_FULL")
	if err != nil {
		return err
	}
	if failed.RetryAfter <= 0 {
		return errors.New("there is no RetryInfo")
	}
	return cancelAll(ctx, blockers)
}

func retryAfterRejection(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	// The retry delay of the server depends on the length of these requests.
	blockers, err := fill(ctx, client, 300)
	if err != nil {
		return err
	}
	policy := penstock.DefaultRetry()
	policy.MaxAttempts = 10
	retrying, err := penstock.Dial(t.address, penstock.WithRetry(policy))
	if err != nil {
		return err
	}
	defer retrying.Close()
	rejected := checkStream(client.Generate(ctx, greedy(12)))
	if _, err := rejected.failure(codes.ResourceExhausted, "QUEUE_FULL"); err != nil {
		return err
	}
	stream := retrying.Generate(ctx, greedy(12))
	// Any response to the first attempt means that it was rejected because of the full queue.
	_, _ = stream.Header()
	served := make(chan error, 1)
	go func() { served <- checkStream(stream).untilWhole(12) }()
	if err := cancelAll(ctx, blockers); err != nil {
		return err
	}
	return <-served
}

func deadline(ctx context.Context, t *scenarioInput) error {
	client, err := dial(t)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	began := time.Now()
	h := checkStream(client.Generate(ctx, greedy(longTokens)))
	failed, err := h.failure(codes.DeadlineExceeded, "")
	if err != nil {
		return err
	}
	if !errors.Is(failed, context.DeadlineExceeded) {
		return fmt.Errorf("%v is not context.DeadlineExceeded", failed)
	}
	if took := time.Since(began); took > 20*time.Second {
		return fmt.Errorf("it took %v", took)
	}
	return nil
}
