package penstock.client;

import io.grpc.CallCredentials;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;

/** Deals calls to several connections in turn, with the credentials of each call. */
final class ConnectionPool extends Channel {
  private final List<ManagedChannel> channels;
  private final CallCredentials credentials;
  private final AtomicInteger next = new AtomicInteger();

  /** Credentials are null for none. */
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

  /** Connects at once where a connection was waiting for its next turn to try. */
  void reconnect() {
    channels.forEach(ManagedChannel::resetConnectBackoff);
  }

  /** Hangs up. */
  void close() {
    channels.forEach(ManagedChannel::shutdownNow);
  }
}
