package penstock.client;

import io.grpc.Metadata;
import java.time.Duration;
import java.util.Objects;

/**
 * What one call is given besides its request. Values are not changed; {@code with} makes new ones.
 *
 * <p>A deadline is the time that the call may take, all attempts together; it travels to the
 * server. A deadline and a cancellation of {@link io.grpc.Context#current()} hold as well.
 */
public final class CallSettings {
  /** No deadline, no trace, no metadata. */
  public static final CallSettings NONE = new CallSettings(null, null, new Metadata());

  private final Duration deadline;
  private final TraceContext trace;
  private final Metadata metadata;

  private CallSettings(Duration deadline, TraceContext trace, Metadata metadata) {
    this.deadline = deadline;
    this.trace = trace;
    this.metadata = metadata;
  }

  /** With the time that the call may take, from its start. */
  public CallSettings withDeadline(Duration deadline) {
    if (deadline.isNegative() || deadline.isZero()) {
      throw new IllegalArgumentException("deadline: must be positive, not " + deadline);
    }
    return new CallSettings(deadline, trace, metadata);
  }

  /** As part of a trace. */
  public CallSettings withTrace(TraceContext trace) {
    return new CallSettings(deadline, Objects.requireNonNull(trace, "trace"), metadata);
  }

  /** With metadata of the caller's, added to what is there. */
  public CallSettings withMetadata(Metadata metadata) {
    Metadata all = new Metadata();
    all.merge(this.metadata);
    all.merge(metadata);
    return new CallSettings(deadline, trace, all);
  }

  /** Null for none. */
  Duration deadline() {
    return deadline;
  }

  /** Null for none. */
  TraceContext trace() {
    return trace;
  }

  /** A copy: gRPC adds to what it sends. */
  Metadata metadata() {
    Metadata copy = new Metadata();
    copy.merge(metadata);
    return copy;
  }
}
