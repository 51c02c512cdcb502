package penstock.client;

import io.grpc.CallCredentials;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptor;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/** How a {@link PenstockClient} connects and tries again. */
public final class ClientBuilder {
  private static final int MAX_MESSAGE_BYTES = 32 << 20;
  // Servers disconnect clients that ping more often than every 20 s.
  private static final int KEEPALIVE_TIME_S = 30;
  private static final int KEEPALIVE_TIMEOUT_S = 10;

  private final Address address;
  private TlsSettings tls;
  private Supplier<String> token;
  private RetryPolicy retry = RetryPolicy.STANDARD;
  private final List<ClientInterceptor> interceptors = new ArrayList<>();
  private int numConnections = 1;

  ClientBuilder(String address) {
    this.address = Address.parse(address);
  }

  /** Encrypts connections. */
  public ClientBuilder tls(TlsSettings tls) {
    this.tls = Objects.requireNonNull(tls, "tls");
    return this;
  }

  /** Sends a bearer token with every call. Without TLS it goes to this machine alone. */
  public ClientBuilder token(String token) {
    Objects.requireNonNull(token, "token");
    return token(() -> token);
  }

  /** Asks for the bearer token before each call, because tokens expire. */
  public ClientBuilder token(Supplier<String> token) {
    this.token = Objects.requireNonNull(token, "token");
    return this;
  }

  /** Replaces {@link RetryPolicy#STANDARD}. */
  public ClientBuilder retry(RetryPolicy retry) {
    this.retry = Objects.requireNonNull(retry, "retry");
    return this;
  }

  /**
   * Opens several connections and deals calls to them in turn. The server's front processes share a
   * port, and the kernel deals them connections: about four for each spread evenly.
   */
  public ClientBuilder connections(int num) {
    if (num < 1) {
      throw new IllegalArgumentException("connections: must be at least 1, not " + num);
    }
    numConnections = num;
    return this;
  }

  /** Adds an interceptor of gRPC, such as one for tracing; it sees every attempt of every call. */
  public ClientBuilder intercept(ClientInterceptor interceptor) {
    interceptors.add(Objects.requireNonNull(interceptor, "interceptor"));
    return this;
  }

  /**
   * Makes the client. It connects with its first call.
   *
   * @throws IllegalArgumentException when a token would cross the network in plain text, or a file
   *     of the TLS settings cannot be read
   */
  public PenstockClient build() {
    if (token != null && tls == null && !address.isLocal()) {
      throw new IllegalArgumentException(
          "token: would cross the network to " + address.target() + " in plain text; use tls");
    }
    ChannelCredentials credentials =
        tls == null ? InsecureChannelCredentials.create() : tls.credentials();
    List<ManagedChannel> channels = new ArrayList<>();
    for (int each = 0; each < numConnections; each++) {
      channels.add(channel(credentials));
    }
    CallCredentials tokens = token == null ? null : new TokenCredentials(token);
    return new PenstockClient(new ConnectionPool(channels, tokens), retry);
  }

  private ManagedChannel channel(ChannelCredentials credentials) {
    ManagedChannelBuilder<?> channel = Grpc.newChannelBuilder(address.target(), credentials);
    channel.intercept(interceptors)
        .disableRetry() // it would multiply with ours
        .maxInboundMessageSize(MAX_MESSAGE_BYTES)
        .keepAliveTime(KEEPALIVE_TIME_S, TimeUnit.SECONDS)
        .keepAliveTimeout(KEEPALIVE_TIMEOUT_S, TimeUnit.SECONDS);
    if (tls != null && tls.serverName() != null) {
      channel.overrideAuthority(tls.serverName());
    }
    if (address.hasManyServers()) {
      channel.defaultLoadBalancingPolicy("round_robin");
    }
    return channel.build();
  }
}
