package penstock.client;

import io.grpc.CallCredentials;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.concurrent.Executor;
import java.util.function.Supplier;
import java.util.regex.Pattern;

/**
 * Sends the bearer token with each call. The supplier is called each time, because tokens expire.
 */
final class TokenCredentials extends CallCredentials {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Pattern SENDABLE = Pattern.compile("[\\x21-\\x7e]+");

  private final Supplier<String> token;

  TokenCredentials(Supplier<String> token) {
    this.token = token;
  }

  @Override
  public void applyRequestMetadata(RequestInfo call, Executor executor, MetadataApplier applier) {
    // The supplier may block, and must not block gRPC's threads.
    executor.execute(() -> apply(applier));
  }

  @Override
  public void thisUsesUnstableApi() {
    // Required of implementations by this release of gRPC.
  }

  private void apply(MetadataApplier applier) {
    String value;
    try {
      value = token.get();
    } catch (RuntimeException failed) {
      Status status = Status.UNAUTHENTICATED.withDescription("token: its source failed");
      applier.fail(status.withCause(failed));
      return;
    }
    if (value == null || !SENDABLE.matcher(value).matches()) {
      // The token is not quoted, because the error may be logged.
      String why = "token: must be printable ASCII without a space, and not empty";
      applier.fail(Status.UNAUTHENTICATED.withDescription(why));
      return;
    }
    Metadata headers = new Metadata();
    headers.put(AUTHORIZATION, "Bearer " + value);
    applier.apply(headers);
  }
}
