package penstock

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	pb "penstock/v1"
)

// multiplexCall is one Multiplex call: a goroutine that reads, one that writes, and the open
// requests.
type multiplexCall struct {
	commands chan *pb.MultiplexRequest
	done     chan struct{} // closed when the call has ended
	unused   chan struct{} // closed when nothing more will be sent

	mu         sync.Mutex
	requests   map[uint64]*multiplexedRequest
	left       map[uint64]struct{} // cancelled by this client, and not ended by the server yet
	lastKey    uint64
	numSending int
	expires    time.Time
	isRetired  bool // accepts no new requests, and ends with its last one
	isUnused   bool
	err        *Error // why it has ended
}

func (m *Multiplex) newCall() *multiplexCall {
	call := &multiplexCall{
		commands: make(chan *pb.MultiplexRequest),
		done:     make(chan struct{}),
		unused:   make(chan struct{}),
		requests: make(map[uint64]*multiplexedRequest),
		left:     make(map[uint64]struct{}),
		expires:  time.Now().Add(m.config.MaxCallAge),
	}
	go call.run(m.ctx, m.client)
	return call
}

// run opens the call, reads it to its end, and then fails the open requests.
func (c *multiplexCall) run(ctx context.Context, client *Client) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.generation.Multiplex(ctx)
	if err != nil {
		c.end(ctx, client, err)
		return
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		c.write(stream)
	}()
	for {
		var response *pb.MultiplexResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		if err = c.receive(response); err != nil {
			break
		}
	}
	c.end(ctx, client, err)
	cancel()
	<-written
}

func (c *multiplexCall) write(stream pb.GenerationService_MultiplexClient) {
	for {
		select {
		case command := <-c.commands:
			// If this fails, the call has ended, and the reader has the reason.
			if stream.Send(command) != nil {
				return
			}
		case <-c.unused:
			_ = stream.CloseSend()
			return
		case <-c.done:
			return
		}
	}
}

// join adds a request. If it returns none, the call accepts no new requests; the error is the
// reason why the call has ended, if it has. A nil call accepts no requests.
func (c *multiplexCall) join(topUp uint32) (*multiplexedRequest, error) {
	if c == nil {
		return nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return nil, c.err
	}
	isOld := c.lastKey > 0 && !time.Now().Before(c.expires)
	if c.isRetired || isOld {
		return nil, nil
	}
	c.lastKey++
	request := &multiplexedRequest{
		call: c, key: c.lastKey, topUp: topUp,
		pending: make(chan struct{}, 1), over: make(chan struct{}),
	}
	c.requests[request.key] = request
	return request, nil
}

// retire makes the call accept no new requests.
func (c *multiplexCall) retire() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isRetired = true
	c.endIfUnused()
}

// send passes a command to the writer. It returns an error if the call or ctx has ended before.
func (c *multiplexCall) send(ctx context.Context, command *pb.MultiplexRequest) error {
	c.mu.Lock()
	if c.isUnused {
		c.mu.Unlock()
		return nil // the request of the command has ended
	}
	c.numSending++
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.numSending--
		c.endIfUnused()
	}()
	select {
	case c.commands <- command:
		return nil
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return contextEnded(ctx.Err())
	}
}

// forget removes a request that was never sent.
func (c *multiplexCall) forget(request *multiplexedRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.requests, request.key)
	c.endIfUnused()
}

// leave removes a request that is no longer read, and cancels it if it is still open.
func (c *multiplexCall) leave(request *multiplexedRequest) {
	if c.abandon(request) {
		// If this fails, the call has ended, and the request with it.
		_ = c.send(context.Background(), request.cancelCommand())
	}
}

// abandon removes a request without ending it. It returns whether it was still open.
func (c *multiplexCall) abandon(request *multiplexedRequest) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, isOpen := c.requests[request.key]
	if isOpen {
		delete(c.requests, request.key)
		c.left[request.key] = struct{}{}
	}
	return isOpen
}

// receive distributes the events of one message.
func (c *multiplexCall) receive(response *pb.MultiplexResponse) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, event := range response.GetEvents() {
		key := event.GetKey()
		failed, message := event.GetError(), event.GetResponse()
		isFinal := failed != nil || message.GetFinished() != nil
		request := c.requests[key]
		if request == nil {
			if _, isLeft := c.left[key]; !isLeft {
				return streamBroken("an event of request %d, which is not open", key)
			}
			if isFinal {
				delete(c.left, key)
			}
			continue
		}
		if isFinal {
			delete(c.requests, key)
		}
		if failed != nil {
			err := errorFromStatus(failed)
			if err.HasReason(pb.ErrorReason_ERROR_REASON_DRAINING) {
				c.isRetired = true
			}
			request.fail(err)
		} else if message != nil {
			request.put(message)
		}
	}
	c.endIfUnused()
	return nil
}

// endIfUnused closes the sending side of a retired call after its last request. Requires mu.
func (c *multiplexCall) endIfUnused() {
	if c.isRetired && !c.isUnused && len(c.requests) == 0 && c.numSending == 0 {
		c.isUnused = true
		close(c.unused)
	}
}

// end fails the open requests.
func (c *multiplexCall) end(ctx context.Context, client *Client, err error) {
	var failed *Error
	switch {
	case client.hasClosed():
		failed = clientClosed()
	case ctx.Err() != nil:
		failed = &Error{Code: codes.Canceled, Message: "the Multiplex was closed"}
	case errors.Is(err, io.EOF):
		failed = &Error{Code: codes.Unavailable, Message: "the server ended the Multiplex call"}
	default:
		failed = asError(err).cancelledToUnavailable()
	}
	if failed.Code == codes.Unimplemented && failed.Reason == "" {
		failed = &Error{
			Code:    codes.Unimplemented,
			Message: "the server does not offer Multiplex: use Client.Generate",
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = failed
	close(c.done)
	for _, request := range c.requests {
		request.fail(failed)
	}
	c.requests = make(map[uint64]*multiplexedRequest)
}
