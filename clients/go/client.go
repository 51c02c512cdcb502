// Package penstock is a client for Penstock, a gRPC service that streams what language models
// generate.
//
// A Client holds the connections and may be shared by goroutines. Generate answers a Stream, which
// is read with Next. Every call ends with its context: its deadline travels to the server, and
// cancelling it ends the request there. Requests and events are the messages of package penstock/v1;
// every failure of a call is an *Error.
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
	// Cancel calls for requests that would outlive their streams.
	leaving sync.WaitGroup
}

// Dial makes a client for an address: HOST, HOST:PORT (50051 for a host alone), [IPV6]:PORT, or a
// gRPC target such as unix:PATH and dns:///HOST:PORT. It does not wait for a connection.
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

// Close hangs up. Open streams end with codes.Canceled; requests with a resume_timeout live on
// and can be resumed by another client. It waits, for 2 s at most, until requests that were left
// before are cancelled.
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

// Conn is for stubs of one's own. Calls on it carry the token and the trace, and fail with *Error.
func (c *Client) Conn() grpc.ClientConnInterface { return &c.conns }

// GenerateOnce answers a request as a whole. Give ctx a deadline: nothing comes before the end.
func (c *Client) GenerateOnce(
	ctx context.Context, request *pb.GenerateRequest,
) (*pb.GenerateOnceResponse, error) {
	return retrying(ctx, c, func() (*pb.GenerateOnceResponse, error) {
		return c.generation.GenerateOnce(ctx, &pb.GenerateOnceRequest{Generation: request})
	})
}

// Cancel ends a request by its id, wherever it was submitted; it answers where the request stood.
func (c *Client) Cancel(ctx context.Context, requestID string) (pb.RequestState, error) {
	response, err := retrying(ctx, c, func() (*pb.CancelResponse, error) {
		return c.generation.Cancel(ctx, &pb.CancelRequest{RequestId: requestID})
	})
	return response.GetState(), err
}

// ListModels answers the models that the caller may use, by name.
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

// GetModel reports what a model can do and what it allows; "" is the server's default model.
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

// Tokenize turns text or a dialogue into token ids.
func (c *Client) Tokenize(
	ctx context.Context, request *pb.TokenizeRequest,
) (*pb.TokenizeResponse, error) {
	return retrying(ctx, c, func() (*pb.TokenizeResponse, error) {
		return c.models.Tokenize(ctx, request)
	})
}

// Detokenize turns token ids into text.
func (c *Client) Detokenize(
	ctx context.Context, request *pb.DetokenizeRequest,
) (*pb.DetokenizeResponse, error) {
	return retrying(ctx, c, func() (*pb.DetokenizeResponse, error) {
		return c.models.Detokenize(ctx, request)
	})
}

// IsServing asks the server's health, once and without retries; "" is the server as a whole.
func (c *Client) IsServing(ctx context.Context, service string) (bool, error) {
	response, err := c.health.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	return response.GetStatus() == healthpb.HealthCheckResponse_SERVING, err
}

// leave ends a request that would outlive its stream, without anyone waiting for it but Close.
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
		// What fails here ends with the request's grace period.
		_, _ = c.Cancel(ctx, requestID)
	}()
}

func (c *Client) hasClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isClosed
}

// pool deals calls to several connections in turn.
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

// close hangs up; the first error.
func (p *pool) close() error {
	var first error
	for _, conn := range p.conns {
		if err := conn.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}
