package penstock.client;

import io.grpc.CallCredentials;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;

/** Distributes calls over several connections, round robin, with the credentials of each call. */
final class ConnectionPool extends Channel {
  private final List<ManagedChannel> channels;
  private final CallCredentials credentials;
  private final AtomicInteger next = new AtomicInteger();

  /** Creates the pool. Credentials are null for none. */
  ConnectionPool(List<ManagedChannel> channels, CallCredentials credentials) {
    this.channels = List.copyOf(channels);
    this.credentials = credentials;
  }

  @Override
  public <R, M> ClientCall<R, M> newCall(MethodDescriptor<R, M> method, CallOptions options) {
    ManagedChannel channel = channels.get(Math.floorMod(next.getAndIncrement(), channels.size()));
    boolean hasOwn = credentials == null || options.getCredentials() != null;
    return channel.newCall(method, hasOwn ? options : options.withCallCredentials(credentials));
  }

  @Override
  public String authority() {
    return channels.get(0).authority();
  }

  /** Connects immediately if a connection waits before its next attempt. */
  void reconnect() {
    channels.forEach(ManagedChannel::resetConnectBackoff);
  }

  /** Closes all connections. */
  void close() {
    channels.forEach(ManagedChannel::shutdownNow);
  }
}
