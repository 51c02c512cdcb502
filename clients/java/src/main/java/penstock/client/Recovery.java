package penstock.client;

import dev.penstock.v1.ErrorReason;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.LongSupplier;

/**
 * Tracks the lost connections of one stream. Each is followed by a Resume within the resume
 * timeout, or reported. Decides only; it does not wait and makes no calls.
 */
final class Recovery {
  private static final double FIRST_DELAY_NS = 50e6;
  private static final double MAX_DELAY_NS = 1e9;

  private final Duration resumeTimeout;
  private final LongSupplier nanoTime;
  private boolean isUnderWay;
  private PenstockException first;
  private long lostAtNs;
  private long sequence;
  private int numFailed;

  Recovery(Duration resumeTimeout, LongSupplier nanoTime) {
    this.resumeTimeout = resumeTimeout;
    this.nanoTime = nanoTime;
  }

  /** Returns the tracker of a stream that begins with a Resume. */
  static Recovery resumed(ResumePoint point, LongSupplier nanoTime) {
    Recovery recovery = new Recovery(point.resumeTimeout(), nanoTime);
    recovery.isUnderWay = true;
    recovery.sequence = point.nextSequence();
    return recovery;
  }

  /** Returns whether the next attempt is a Resume. */
  boolean isUnderWay() {
    return isUnderWay;
  }

  /** Returns how long to wait before the stream is resumed; empty if it cannot be resumed. */
  Optional<Duration> delayAfter(PenstockException failure, ResumePoint point) {
    boolean isEngineDown = failure.hasReason(ErrorReason.ERROR_REASON_ENGINE_DOWN);
    boolean isCut = failure.code() == Status.Code.UNAVAILABLE
        || failure.reason().equals(PenstockException.STREAM_BROKEN);
    boolean hasProgressed = point.nextSequence() > sequence;
    // No engine runs from which the stream could be resumed. A stream that has continued gets the
    // same error when the request itself fails.
    boolean isOutOfReach = isUnderWay && !hasProgressed && isEngineDown;
    boolean isLoss = (isCut && !isEngineDown) || isOutOfReach;
    // Without a request id the server has accepted nothing, so there is nothing to resume.
    if (resumeTimeout.isZero() || point.requestId().isEmpty() || !isLoss) {
      isUnderWay = false;
      return Optional.empty();
    }
    if (first == null || hasProgressed) {
      // The stream had continued, so this is a new loss with a new resume timeout.
      first = failure;
      lostAtNs = nanoTime.getAsLong();
      numFailed = 0;
    }
    sequence = point.nextSequence();
    Duration delay = nextDelay(failure);
    Duration since = Duration.ofNanos(nanoTime.getAsLong() - lostAtNs);
    isUnderWay = since.plus(delay).compareTo(resumeTimeout) <= 0;
    return isUnderWay ? Optional.of(delay) : Optional.empty();
  }

  /** Returns the error to report. If the request was not found, that is the original loss. */
  PenstockException explain(PenstockException failure) {
    boolean isForgotten = failure.hasReason(ErrorReason.ERROR_REASON_REQUEST_NOT_FOUND);
    return first != null && isForgotten ? first : failure;
  }

  private Duration nextDelay(PenstockException failure) {
    double backoff = Math.min(FIRST_DELAY_NS * Math.pow(2, numFailed), MAX_DELAY_NS);
    numFailed++;
    double jitter = ThreadLocalRandom.current().nextDouble();
    Duration delay = Duration.ofNanos((long) (backoff * (0.5 + 0.5 * jitter)));
    return failure.retryAfter().compareTo(delay) > 0 ? failure.retryAfter() : delay;
  }
}
