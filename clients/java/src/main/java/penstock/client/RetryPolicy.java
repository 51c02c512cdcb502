package penstock.client;

import dev.penstock.v1.ErrorReason;
import io.grpc.Status;
import java.time.Duration;

/**
 * Defines how often and after what delay a call is retried.
 *
 * <p>A call is retried only if all of these conditions hold: none of its output was delivered; its
 * status is UNAVAILABLE, or RESOURCE_EXHAUSTED for a full queue, a quota or with a retry delay; the
 * server did not forbid retries; attempts are left; and the wait ends before the deadline. The wait
 * is the server's retry delay plus up to {@code pushbackJitter} of it. Without a retry delay it is
 * between half and all of {@code initialBackoff}, which grows by {@code multiplier} up to {@code
 * maxBackoff}. As in gRFC A6 (client-side retry).
 *
 * @param maxAttempts maximum number of attempts of one call, including the first; at least 1
 * @param initialBackoff the wait after the first failure; not negative
 * @param multiplier growth of the wait with each attempt; finite, at least 1
 * @param maxBackoff the maximum wait, unless the server requests a longer one; not negative
 * @param pushbackJitter maximum share of the server's delay that is added; finite, not negative
 */
public record RetryPolicy(int maxAttempts, Duration initialBackoff, double multiplier,
    Duration maxBackoff, double pushbackJitter) {
  /** Four attempts, waits of 0.2 s to 5 s. */
  public static final RetryPolicy STANDARD =
      new RetryPolicy(4, Duration.ofMillis(200), 2, Duration.ofSeconds(5), 0.2);

  /** No retries: each failure is reported immediately. */
  public static final RetryPolicy NONE = new RetryPolicy(1, Duration.ZERO, 1, Duration.ZERO, 0);

  /** Rejects invalid values. */
  public RetryPolicy {
    require(maxAttempts >= 1, "maxAttempts: must be at least 1");
    require(!initialBackoff.isNegative(), "initialBackoff: must not be negative");
    require(multiplier >= 1 && Double.isFinite(multiplier), "multiplier: must be at least 1");
    require(!maxBackoff.isNegative(), "maxBackoff: must not be negative");
    boolean isShare = pushbackJitter >= 0 && Double.isFinite(pushbackJitter);
    require(isShare, "pushbackJitter: must not be negative");
  }

  /** Returns the same policy with another number of attempts. */
  public RetryPolicy withMaxAttempts(int maxAttempts) {
    return new RetryPolicy(maxAttempts, initialBackoff, multiplier, maxBackoff, pushbackJitter);
  }

  /**
   * Returns the wait after attempt number attempt, counted from 1, has failed; jitter is in [0, 1).
   */
  Duration delay(PenstockException failure, int attempt, double jitter) {
    double retryAfterNanos = nanos(failure.retryAfter());
    if (retryAfterNanos > 0) {
      return Duration.ofNanos((long) (retryAfterNanos * (1 + pushbackJitter * jitter)));
    }
    double backoff = nanos(initialBackoff) * Math.pow(multiplier, attempt - 1);
    return Duration.ofNanos((long) (Math.min(backoff, nanos(maxBackoff)) * (0.5 + 0.5 * jitter)));
  }

  /**
   * Returns whether the same call may succeed soon. Without details, RESOURCE_EXHAUSTED usually
   * means a message over a size limit, which is permanent.
   */
  static boolean isTransient(PenstockException failure) {
    if (failure.isRetryForbidden() || failure.hasReason(ErrorReason.ERROR_REASON_READER_STALLED)) {
      return false;
    }
    if (failure.code() == Status.Code.RESOURCE_EXHAUSTED) {
      return !failure.retryAfter().isZero()
          || failure.hasReason(ErrorReason.ERROR_REASON_QUEUE_FULL)
          || failure.hasReason(ErrorReason.ERROR_REASON_QUOTA_EXCEEDED);
    }
    return failure.code() == Status.Code.UNAVAILABLE;
  }

  private static double nanos(Duration duration) {
    return duration.getSeconds() * 1e9 + duration.getNano();
  }

  private static void require(boolean holds, String why) {
    if (!holds) {
      throw new IllegalArgumentException(why);
    }
  }
}
