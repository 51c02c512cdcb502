package penstock.client;

import io.grpc.Metadata;
import java.time.Duration;
import java.util.Objects;

/**
 * The settings of one call. They are immutable; the {@code with} methods return new ones.
 *
 * <p>A deadline is the time that the call may take, with all attempts. It is sent to the server.
 * The deadline and the cancellation of {@link io.grpc.Context#current()} apply as well.
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

  /** Returns settings with the time that the call may take, from its start. */
  public CallSettings withDeadline(Duration deadline) {
    if (deadline.isNegative() || deadline.isZero()) {
      throw new IllegalArgumentException("deadline: must be positive, not " + deadline);
    }
    return new CallSettings(deadline, trace, metadata);
  }

  /** Returns settings with a trace to which the call belongs. */
  public CallSettings withTrace(TraceContext trace) {
    return new CallSettings(deadline, Objects.requireNonNull(trace, "trace"), metadata);
  }

  /** Returns settings with additional metadata. */
  public CallSettings withMetadata(Metadata metadata) {
    Metadata all = new Metadata();
    all.merge(this.metadata);
    all.merge(metadata);
    return new CallSettings(deadline, trace, all);
  }

  /** Returns the time that the call may take; null for no deadline. */
  Duration deadline() {
    return deadline;
  }

  /** Returns the trace; null for none. */
  TraceContext trace() {
    return trace;
  }

  /** Returns a copy, because gRPC adds to the metadata that it sends. */
  Metadata metadata() {
    Metadata copy = new Metadata();
    copy.merge(metadata);
    return copy;
  }
}
