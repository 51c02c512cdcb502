// Package penstock is a client for Penstock, a gRPC service that streams the output of language
// models.
//
// A Client holds the connections and may be shared by goroutines. Generate returns a Stream, which
// is read with Next. Every call ends with its context: the deadline of the context is sent to the
// server, and cancelling the context cancels the request on the server. Requests and events are the
// messages of package penstock/v1. Every failure of a call is an *Error.
package penstock

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	pb "penstock/v1"
)

// Client makes calls to one address. Close it when it is no longer needed.
type Client struct {
	conns      pool
	generation pb.GenerationServiceClient
	models     pb.ModelServiceClient
	health     healthpb.HealthClient
	retry      RetryPolicy
	budget     *retryBudget

	mu        sync.Mutex
	isClosing bool
	isClosed  bool
	// The Cancel calls for requests that would continue after their streams.
	leaving sync.WaitGroup
}

// Dial creates a client for an address: HOST, HOST:PORT (the default port is 50051), [IPV6]:PORT,
// or a gRPC target such as unix:PATH and dns:///HOST:PORT. It does not wait for a connection.
func Dial(address string, opts ...Option) (*Client, error) {
	target, err := grpcTarget(address)
	if err != nil {
		return nil, err
	}
	s := defaultSettings()
	for _, opt := range opts {
		if err := opt(&s); err != nil {
			return nil, err
		}
	}
	c := &Client{retry: s.retry, budget: newRetryBudget()}
	dialOptions, err := s.dialOptions(target)
	if err != nil {
		return nil, err
	}
	dialOptions = append(dialOptions,
		grpc.WithChainUnaryInterceptor(c.interceptUnary),
		grpc.WithChainStreamInterceptor(c.interceptStream),
	)
	for i := 0; i < s.numConnections; i++ {
		conn, err := grpc.Dial(target, append(dialOptions, s.extra...)...)
		if err != nil {
			_ = c.conns.close()
			return nil, fmt.Errorf("penstock: %w", err)
		}
		c.conns.conns = append(c.conns.conns, conn)
	}
	c.generation = pb.NewGenerationServiceClient(&c.conns)
	c.models = pb.NewModelServiceClient(&c.conns)
	c.health = healthpb.NewHealthClient(&c.conns)
	return c, nil
}

// Close closes the connections. Open streams end with codes.Canceled. Requests with a
// resume_timeout continue, and another client can resume them. It waits for at most 2 s until
// requests whose streams were closed before are cancelled.
func (c *Client) Close() error {
	c.mu.Lock()
	c.isClosing = true
	c.mu.Unlock()
	c.leaving.Wait()
	c.mu.Lock()
	c.isClosed = true
	c.mu.Unlock()
	return c.conns.close()
}

// Conn returns the connection for generated stubs of other services. Calls on it send the token and
// the trace context, and fail with *Error.
func (c *Client) Conn() grpc.ClientConnInterface { return &c.conns }

// GenerateOnce returns the complete result of a request. Set a deadline on ctx, because nothing is
// returned before the end.
func (c *Client) GenerateOnce(
	ctx context.Context, request *pb.GenerateRequest,
) (*pb.GenerateOnceResponse, error) {
	return retrying(ctx, c, func() (*pb.GenerateOnceResponse, error) {
		return c.generation.GenerateOnce(ctx, &pb.GenerateOnceRequest{Generation: request})
	})
}

// Cancel ends a request of the caller's tenant by its id, regardless of the client that submitted
// it. It returns the state of the request before the cancellation.
func (c *Client) Cancel(ctx context.Context, requestID string) (pb.RequestState, error) {
	response, err := retrying(ctx, c, func() (*pb.CancelResponse, error) {
		return c.generation.Cancel(ctx, &pb.CancelRequest{RequestId: requestID})
	})
	return response.GetState(), err
}

// ListModels returns the models that the caller may use, sorted by name.
func (c *Client) ListModels(ctx context.Context) ([]*pb.ModelInfo, error) {
	var models []*pb.ModelInfo
	for token := ""; ; {
		request := &pb.ListModelsRequest{PageToken: token}
		page, err := retrying(ctx, c, func() (*pb.ListModelsResponse, error) {
			return c.models.ListModels(ctx, request)
		})
		if err != nil {
			return nil, err
		}
		models = append(models, page.GetModels()...)
		if token = page.GetNextPageToken(); token == "" {
			return models, nil
		}
	}
}

// GetModel returns the features and limits of a model; "" means the default model of the server.
func (c *Client) GetModel(ctx context.Context, name string) (*pb.ModelInfo, error) {
	request := &pb.GetModelRequest{}
	if name != "" {
		request.Name = &name
	}
	response, err := retrying(ctx, c, func() (*pb.GetModelResponse, error) {
		return c.models.GetModel(ctx, request)
	})
	return response.GetModel(), err
}

// Tokenize converts text or a conversation to token ids.
func (c *Client) Tokenize(
	ctx context.Context, request *pb.TokenizeRequest,
) (*pb.TokenizeResponse, error) {
	return retrying(ctx, c, func() (*pb.TokenizeResponse, error) {
		return c.models.Tokenize(ctx, request)
	})
}

// Detokenize converts token ids to text.
func (c *Client) Detokenize(
	ctx context.Context, request *pb.DetokenizeRequest,
) (*pb.DetokenizeResponse, error) {
	return retrying(ctx, c, func() (*pb.DetokenizeResponse, error) {
		return c.models.Detokenize(ctx, request)
	})
}

// IsServing returns whether a service is SERVING in grpc.health.v1, without retries; "" means the
// whole server.
func (c *Client) IsServing(ctx context.Context, service string) (bool, error) {
	response, err := c.health.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	return response.GetStatus() == healthpb.HealthCheckResponse_SERVING, err
}

// leave cancels a request that would continue after its stream. Only Close waits for the call.
func (c *Client) leave(ctx context.Context, requestID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isClosing {
		return
	}
	c.leaving.Add(1)
	go func() {
		defer c.leaving.Done()
		ctx, cancel := context.WithTimeout(detached{ctx}, leavingDeadline)
		defer cancel()
		// If this fails, the request ends after its resume_timeout.
		_, _ = c.Cancel(ctx, requestID)
	}()
}

func (c *Client) hasClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isClosed
}

// pool distributes calls over several connections, round robin.
type pool struct {
	conns []*grpc.ClientConn
	next  uint32
}

func (p *pool) take() *grpc.ClientConn {
	return p.conns[int(atomic.AddUint32(&p.next, 1))%len(p.conns)]
}

func (p *pool) Invoke(
	ctx context.Context, method string, args, reply interface{}, opts ...grpc.CallOption,
) error {
	return p.take().Invoke(ctx, method, args, reply, opts...)
}

func (p *pool) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return p.take().NewStream(ctx, desc, method, opts...)
}

// close closes the connections and returns the first error.
func (p *pool) close() error {
	var first error
	for _, conn := range p.conns {
		if err := conn.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}
