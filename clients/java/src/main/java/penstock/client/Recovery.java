package penstock.client;

import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.LongSupplier;
import dev.penstock.v1.ErrorReason;

/**
 * The account of one stream's losses, each of which is made good within the grace period, or
 * reported.
 * Decides; does not wait and does not call.
 */
final class Recovery {
  private static final double FIRST_DELAY_NS = 50e6;
  private static final double MAX_DELAY_NS = 1e9;

  private final Duration grace;
  private final LongSupplier nanoTime;
  private boolean isUnderWay;
  private PenstockException first;
  private long lostAtNs;
  private long sequence;
  private int numFailed;

  Recovery(Duration grace, LongSupplier nanoTime) {
    this.grace = grace;
    this.nanoTime = nanoTime;
  }

  /** Of a stream that begins by being resumed. */
  static Recovery resumed(ResumePoint point, LongSupplier nanoTime) {
    Recovery recovery = new Recovery(point.gracePeriod(), nanoTime);
    recovery.isUnderWay = true;
    recovery.sequence = point.nextSequence();
    return recovery;
  }

  /** Whether the next attempt is a Resume. */
  boolean isUnderWay() {
    return isUnderWay;
  }

  /** How long to wait before the stream is resumed; empty where it cannot be. */
  Optional<Duration> delayAfter(PenstockException failure, ResumePoint point) {
    boolean isEngineDown = failure.hasReason(ErrorReason.ERROR_REASON_ENGINE_DOWN);
    boolean isCut = failure.code() == Status.Code.UNAVAILABLE
        || failure.reason().equals(PenstockException.STREAM_BROKEN);
    boolean hasGoneOn = point.nextSequence() > sequence;
    // Then there is no engine over which it could be fetched; a stream that has continued is
    // reported so of the request itself.
    boolean isOutOfReach = isUnderWay && !hasGoneOn && isEngineDown;
    boolean isLoss = (isCut && !isEngineDown) || isOutOfReach;
    // Without a request id the server stated nothing, and no client waits for us.
    if (grace.isZero() || point.requestId().isEmpty() || !isLoss) {
      isUnderWay = false;
      return Optional.empty();
    }
    if (first == null || hasGoneOn) {
      // It had continued: this is a new loss, with a separate grace.
      first = failure;
      lostAtNs = nanoTime.getAsLong();
      numFailed = 0;
    }
    sequence = point.nextSequence();
    Duration delay = nextDelay(failure);
    Duration since = Duration.ofNanos(nanoTime.getAsLong() - lostAtNs);
    isUnderWay = since.plus(delay).compareTo(grace) <= 0;
    return isUnderWay ? Optional.of(delay) : Optional.empty();
  }

  /** That no client knows the request any more is only the end of what began with the loss. */
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
