package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"time"

	"example.com/hello/outriderpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
)

// Retries calls that found no room or no router. It applies only before the first message of an answer.
const retries = `{"methodConfig": [{
	"name": [{"service": "outrider.v1.RouterService"}],
	"retryPolicy": {
		"maxAttempts": 4, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
		"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
	}
}]}`

func main() {
	target := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	conn, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // or credentials.NewClientTLSFromFile("ca.pem", "")
		grpc.WithDefaultServiceConfig(retries))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	router := outriderpb.NewRouterServiceClient(conn)

	// Cancelling the context cancels the call, and the router frees everything the request held.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	question := &outriderpb.ChatMessage{Role: "user", Content: "Why is the sky blue?"}
	stream, err := router.Generate(ctx, &outriderpb.GenerateRequest{
		Prompt: &outriderpb.GenerateRequest_Chat{
			Chat: &outriderpb.Chat{Messages: []*outriderpb.ChatMessage{question}},
		},
		Sampling: &outriderpb.SamplingParams{
			Temperature: proto.Float32(0.7),
			TopP:        proto.Float32(0.95),
			Seed:        proto.Uint64(7),
			MaxTokens:   proto.Uint32(48),
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			log.Fatal(err) // a status: status.FromError(err) has code, message and details
		}
		switch event := response.Event.(type) {
		case *outriderpb.GenerateResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *outriderpb.GenerateResponse_Summary:
			fmt.Printf("\n%d tokens\n", event.Summary.Usage.NumGeneratedTokens)
		}
	}
	fmt.Printf("first token after %s ms\n", stream.Trailer().Get("outrider-ttft-ms")[0])
}
