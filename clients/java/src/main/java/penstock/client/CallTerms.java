package penstock.client;

import io.grpc.CallOptions;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Metadata;
import java.time.Duration;
import java.util.concurrent.TimeUnit;

/**
 * The settings of a call that has started. Its deadline is a point in time, the same for all
 * attempts.
 *
 * @param deadline null for none
 */
record CallTerms(Deadline deadline, CallSettings settings) {
  static CallTerms begin(CallSettings settings) {
    Deadline own = null;
    if (settings.deadline() != null) {
      own = Deadline.after(saturatedNanos(settings.deadline()), TimeUnit.NANOSECONDS);
    }
    Deadline outer = Context.current().getDeadline();
    if (own == null || outer == null) {
      return new CallTerms(own == null ? outer : own, settings);
    }
    return new CallTerms(own.minimum(outer), settings);
  }

  CallOptions options() {
    return deadline == null ? CallOptions.DEFAULT : CallOptions.DEFAULT.withDeadline(deadline);
  }

  Metadata headers() {
    Metadata headers = settings.metadata();
    if (settings.trace() != null) {
      settings.trace().putInto(headers);
    }
    return headers;
  }

  /** Returns the nanoseconds until the deadline; the largest number without a deadline. */
  long leftNanos() {
    return deadline == null ? Long.MAX_VALUE : deadline.timeRemaining(TimeUnit.NANOSECONDS);
  }

  /** Returns a duration in nanoseconds, or the largest number if it does not fit. */
  static long saturatedNanos(Duration duration) {
    try {
      return duration.toNanos();
    } catch (ArithmeticException tooLong) {
      return Long.MAX_VALUE;
    }
  }
}
