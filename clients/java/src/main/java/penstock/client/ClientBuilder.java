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

/** Configures the connections and the retries of a {@link PenstockClient}. */
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

  /**
   * Sends a bearer token with each call. Without TLS, {@link #build} fails unless the address is
   * local.
   */
  public ClientBuilder token(String token) {
    Objects.requireNonNull(token, "token");
    return token(() -> token);
  }

  /** Calls the supplier for the bearer token before each call, because tokens expire. */
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
   * Opens several connections and distributes calls over them, round robin. The front processes of
   * a server share a port, and the kernel assigns connections to them: about four connections per
   * front distribute calls evenly.
   */
  public ClientBuilder connections(int num) {
    if (num < 1) {
      throw new IllegalArgumentException("connections: must be at least 1, not " + num);
    }
    numConnections = num;
    return this;
  }

  /** Adds a gRPC interceptor, such as one for tracing. It receives each attempt of each call. */
  public ClientBuilder intercept(ClientInterceptor interceptor) {
    interceptors.add(Objects.requireNonNull(interceptor, "interceptor"));
    return this;
  }

  /**
   * Creates the client. It connects at its first call.
   *
   * @throws IllegalArgumentException if a token would cross the network in plain text, or if a file
   *     of the TLS settings cannot be read
   */
  public PenstockClient build() {
    if (token != null && tls == null && !address.isLocal()) {
      throw new IllegalArgumentException(
          "token: would cross the network to " + address.target() + " in plain text; set tls");
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
        .disableRetry()  // Retries of gRPC would multiply with those of this client.
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
