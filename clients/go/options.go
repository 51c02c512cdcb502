package penstock

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
)

const (
	defaultPort     = "50051"
	maxMessageBytes = 32 << 20
	// Servers disconnect clients that ping more often than every 20 s.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 10 * time.Second
	// gRPC waits a second before it reconnects. With a shorter wait, a restarted server is found
	// sooner.
	firstReconnectDelay = 200 * time.Millisecond
	maxReconnectDelay   = 5 * time.Second
	connectTimeout      = 5 * time.Second
	leavingDeadline     = 2 * time.Second
	// Only for targets with several servers. A plain HOST:PORT is one server.
	roundRobin = `{"loadBalancingConfig": [{"round_robin": {}}]}`
)

// Option configures connections and retries of a Client.
type Option func(*settings) error

type settings struct {
	tls            *tls.Config
	token          func() (string, error)
	retry          RetryPolicy
	numConnections int
	extra          []grpc.DialOption
}

func defaultSettings() settings {
	return settings{retry: DefaultRetry(), numConnections: 1}
}

// WithTLS encrypts connections. An empty config accepts the certificate authorities of the system.
func WithTLS(config *tls.Config) Option {
	return func(s *settings) error {
		if config == nil {
			return errors.New("penstock: tls: config must not be nil")
		}
		s.tls = config
		return nil
	}
}

// TLSFromFiles reads a config from PEM files: the accepted authorities ("" for those of the
// system), and the client's certificate chain and key for mutual TLS ("" for none).
func TLSFromFiles(ca, cert, key string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("penstock: ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("penstock: ca: %s contains no certificate", ca)
		}
	}
	if (cert == "") != (key == "") {
		return nil, errors.New("penstock: cert and key: each requires the other")
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("penstock: cert and key: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// WithToken sends a bearer token with each call. Without TLS, Dial fails unless the address is a
// Unix socket or a loopback address.
func WithToken(token string) Option {
	return WithTokenSource(func() (string, error) { return token, nil })
}

// WithTokenSource calls the function before each call, because tokens expire.
func WithTokenSource(token func() (string, error)) Option {
	return func(s *settings) error {
		if token == nil {
			return errors.New("penstock: token: source must not be nil")
		}
		s.token = token
		return nil
	}
}

// WithRetry replaces DefaultRetry. NoRetry disables retries.
func WithRetry(policy RetryPolicy) Option {
	return func(s *settings) error {
		s.retry = policy
		return policy.check()
	}
}

// WithConnections opens several connections and distributes calls over them, round robin. The front
// processes of a server share a port, and the kernel assigns connections to them: about four
// connections per front distribute calls evenly.
func WithConnections(num int) Option {
	return func(s *settings) error {
		if num < 1 {
			return fmt.Errorf("penstock: connections: must be at least 1, not %d", num)
		}
		s.numConnections = num
		return nil
	}
}

// WithDialOptions passes options to gRPC, such as chained interceptors for tracing.
func WithDialOptions(opts ...grpc.DialOption) Option {
	return func(s *settings) error {
		s.extra = append(s.extra, opts...)
		return nil
	}
}

func (s *settings) dialOptions(target string) ([]grpc.DialOption, error) {
	options := []grpc.DialOption{
		grpc.WithDisableRetry(), // retries of gRPC would multiply with those of this client
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveTime, Timeout: keepaliveTimeout,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: firstReconnectDelay, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxReconnectDelay,
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes),
		),
	}
	if strings.HasPrefix(target, "dns:") {
		options = append(options, grpc.WithDefaultServiceConfig(roundRobin))
	}
	if s.tls != nil {
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(s.tls)))
	} else {
		options = append(options, grpc.WithInsecure())
	}
	if s.token != nil {
		if s.tls == nil && !isLocal(target) {
			return nil, fmt.Errorf(
				"penstock: token: would cross the network to %s in plain text; use WithTLS", target)
		}
		options = append(options, grpc.WithPerRPCCredentials(tokenCredentials{s.token, s.tls != nil}))
	}
	return options, nil
}

// grpcTarget returns the gRPC target of an address.
func grpcTarget(address string) (string, error) {
	for _, scheme := range []string{"dns:", "unix:", "unix-abstract:", "passthrough:", "xds:"} {
		if strings.HasPrefix(address, scheme) {
			return address, nil
		}
	}
	host, port := address, defaultPort
	if inner := strings.TrimSuffix(strings.TrimPrefix(address, "["), "]"); len(inner) == len(address)-2 {
		host = inner
	} else if strings.Contains(address, ":") {
		var err error
		if host, port, err = net.SplitHostPort(address); err != nil {
			return "", fmt.Errorf("penstock: address: %w", err)
		}
	}
	if number, err := strconv.ParseUint(port, 10, 16); err != nil || number == 0 {
		return "", fmt.Errorf("penstock: address: the port must be from 1 to 65535, not %q", port)
	}
	if host == "" || strings.ContainsAny(host, "/ []") {
		return "", fmt.Errorf(
			"penstock: address: must be HOST, HOST:PORT, [IPV6]:PORT or a gRPC target, not %q", address)
	}
	return net.JoinHostPort(host, port), nil
}

// isLocal returns whether target is on this machine.
func isLocal(target string) bool {
	if strings.HasPrefix(target, "unix") {
		return true
	}
	target = strings.TrimLeft(strings.TrimPrefix(target, "dns:"), "/")
	host, _, err := net.SplitHostPort(target)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || (ip != nil && ip.IsLoopback())
}
