package penstock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"penstock"
	pb "penstock/v1"
)

func text(prompt string) *pb.GenerateRequest {
	return &pb.GenerateRequest{
		Prompt: &pb.GenerateRequest_TextPrompt{TextPrompt: &pb.TextPrompt{Text: prompt}},
	}
}

// The examples are compiled with the tests, and run only against a service.

func ExampleClient_Generate() {
	client, err := penstock.Dial("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	stream := client.Generate(ctx, text("To be, or not"))
	defer stream.Close()
	for stream.Next() {
		fmt.Print(stream.Response().GetTokens().GetText())
	}
	var failed *penstock.Error
	if errors.As(stream.Err(), &failed) {
		log.Fatal(failed.Code, failed.Reason, failed.RetryAfter, failed.FieldViolations)
	}
}

func ExampleClient_Resume() {
	client, err := penstock.Dial("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	request := text("To be, or not")
	request.ResumeTimeout = durationpb.New(time.Minute)
	stream := client.Generate(context.Background(), request)
	for stream.Next() && stream.Point().NextSequence < 20 {
		fmt.Print(stream.Response().GetTokens().GetText())
	}
	stream.Detach()

	// In this process or another one, within a minute.
	stream = client.Resume(context.Background(), stream.Point())
	defer stream.Close()
	for stream.Next() {
		fmt.Print(stream.Response().GetTokens().GetText())
	}
}

func ExampleClient_Multiplex() {
	client, err := penstock.Dial("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	shared, err := client.Multiplex(context.Background(), penstock.DefaultMultiplex())
	if err != nil {
		log.Fatal(err)
	}
	defer shared.Close()
	stream := shared.Generate(context.Background(), text("To be, or not"))
	defer stream.Close()
	for stream.Next() {
		fmt.Print(stream.Response().GetTokens().GetText())
	}
}
