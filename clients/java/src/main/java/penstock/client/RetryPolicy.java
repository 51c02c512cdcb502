package penstock.client;

import io.grpc.Status;
import java.time.Duration;
import dev.penstock.v1.ErrorReason;

/**
 * How often and how patiently a call is tried again.
 *
 * <p>A call is tried again only while no output of it was delivered, its status is UNAVAILABLE, or
 * RESOURCE_EXHAUSTED for a full queue, a quota or with a time to wait, the server did not refuse
 * it, attempts are left, and the wait ends before the deadline. The wait is what the server states
 * and up to {@code pushbackJitter} of it more; silently from it, between half and all of
 * {@code initialBackoff}, which grows by {@code multiplier} up to {@code maxBackoff}. After gRFC A6
 * (client-side retry).
 *
 * @param maxAttempts attempts of one call, the first included; at least 1
 * @param initialBackoff the wait after the first failure; not negative
 * @param multiplier how each wait grows over the one before; finite, at least 1
 * @param maxBackoff the longest wait that the server did not ask for; not negative
 * @param pushbackJitter share of the server's wait that is added at most; finite, not negative
 */
public record RetryPolicy(int maxAttempts, Duration initialBackoff, double multiplier,
    Duration maxBackoff, double pushbackJitter) {
  /** Four attempts, waits of 0.2 s to 5 s. */
  public static final RetryPolicy STANDARD =
      new RetryPolicy(4, Duration.ofMillis(200), 2, Duration.ofSeconds(5), 0.2);

  /** Every failure is reported at once. */
  public static final RetryPolicy NONE = new RetryPolicy(1, Duration.ZERO, 1, Duration.ZERO, 0);

  /** Refuses values that make no sense. */
  public RetryPolicy {
    require(maxAttempts >= 1, "maxAttempts: must be at least 1");
    require(!initialBackoff.isNegative(), "initialBackoff: must not be negative");
    require(multiplier >= 1 && Double.isFinite(multiplier), "multiplier: must be at least 1");
    require(!maxBackoff.isNegative(), "maxBackoff: must not be negative");
    boolean isShare = pushbackJitter >= 0 && Double.isFinite(pushbackJitter);
    require(isShare, "pushbackJitter: must not be negative");
  }

  /** The same with another number of attempts. */
  public RetryPolicy withMaxAttempts(int maxAttempts) {
    return new RetryPolicy(maxAttempts, initialBackoff, multiplier, maxBackoff, pushbackJitter);
  }

  /** The wait after the attempt with this number, from 1, failed; jitter is from [0, 1). */
  Duration delay(PenstockException failure, int attempt, double jitter) {
    double told = nanos(failure.retryAfter());
    if (told > 0) {
      return Duration.ofNanos((long) (told * (1 + pushbackJitter * jitter)));
    }
    double backoff = nanos(initialBackoff) * Math.pow(multiplier, attempt - 1);
    return Duration.ofNanos((long) (Math.min(backoff, nanos(maxBackoff)) * (0.5 + 0.5 * jitter)));
  }

  /**
   * Whether the same call may succeed a little later. Bare, RESOURCE_EXHAUSTED usually means a
   * message over a size limit, which does not pass.
   */
  static boolean isPassing(PenstockException failure) {
    if (failure.isRetryRefused() || failure.hasReason(ErrorReason.ERROR_REASON_READER_STALLED)) {
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
