package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.jupiter.api.Test;

/** Retries and recoveries: when, after what delay, how often. */
class RetryTest {
  private static final ResumePoint POINT =
      new ResumePoint(FakeServer.ID, 5, List.of(4), Duration.ofSeconds(10));
  private static final CallTerms NO_DEADLINE = CallTerms.begin(CallSettings.NONE);

  private final AtomicLong nowNs = new AtomicLong();

  private static PenstockException failure(Status.Code code, String reason, Duration retryAfter) {
    PenstockException.Details details =
        new PenstockException.Details(reason, Map.of(), retryAfter, false, List.of(), "");
    return new PenstockException(code, "why", details, null);
  }

  private static PenstockException failure(Status.Code code, String reason) {
    return failure(code, reason, Duration.ZERO);
  }

  @Test
  void waitsForRetryAfterOrLongerEachTime() {
    RetryPolicy policy = RetryPolicy.STANDARD;
    PenstockException rejected = failure(Status.Code.UNAVAILABLE, "", Duration.ofSeconds(10));
    assertEquals(Duration.ofSeconds(10), policy.delay(rejected, 1, 0));
    assertEquals(Duration.ofSeconds(11), policy.delay(rejected, 1, 0.5));
    PenstockException bare = failure(Status.Code.UNAVAILABLE, "");
    assertEquals(Duration.ofMillis(100), policy.delay(bare, 1, 0));
    assertEquals(Duration.ofMillis(400), policy.delay(bare, 3, 0));
    assertEquals(Duration.ofMillis(2500), policy.delay(bare, 30, 0));
  }

  @Test
  void triesAgainWhatPasses() {
    assertTrue(RetryPolicy.isTransient(failure(Status.Code.UNAVAILABLE, "DRAINING")));
    assertTrue(RetryPolicy.isTransient(failure(Status.Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")));
    assertFalse(RetryPolicy.isTransient(failure(Status.Code.RESOURCE_EXHAUSTED, "")));
    assertFalse(RetryPolicy.isTransient(failure(Status.Code.RESOURCE_EXHAUSTED, "READER_STALLED")));
    assertFalse(RetryPolicy.isTransient(failure(Status.Code.INVALID_ARGUMENT, "")));
  }

  @Test
  void attemptsEnd() {
    Attempts attempts = new Attempts(RetryPolicy.STANDARD.withMaxAttempts(2), new RetryBudget());
    PenstockException failure = failure(Status.Code.UNAVAILABLE, "");
    assertTrue(attempts.delayAfter(failure, NO_DEADLINE).isPresent());
    assertTrue(attempts.delayAfter(failure, NO_DEADLINE).isEmpty());
  }

  @Test
  void aWaitBeyondTheDeadlineIsNotStarted() {
    CallTerms terms = CallTerms.begin(CallSettings.NONE.withDeadline(Duration.ofSeconds(30)));
    Attempts attempts = new Attempts(RetryPolicy.STANDARD, new RetryBudget());
    PenstockException far = failure(Status.Code.UNAVAILABLE, "", Duration.ofSeconds(60));
    assertTrue(attempts.delayAfter(far, terms).isEmpty());
    PenstockException near = failure(Status.Code.UNAVAILABLE, "", Duration.ofSeconds(1));
    assertTrue(attempts.delayAfter(near, terms).isPresent());
  }

  @Test
  void aCrowdRunsOutOfRetries() {
    RetryBudget budget = new RetryBudget();
    for (int each = 0; each < 100; each++) {
      assertTrue(budget.take());
    }
    assertFalse(budget.take());
    for (int each = 0; each < 5; each++) {
      budget.deposit();
    }
    assertTrue(budget.take());
  }

  @Test
  void nonsenseIsRejected() {
    RetryPolicy policy = RetryPolicy.STANDARD;
    assertThrows(IllegalArgumentException.class, () -> policy.withMaxAttempts(0));
    Duration second = Duration.ofSeconds(1);
    assertThrows(IllegalArgumentException.class, () -> new RetryPolicy(2, second, 0.5, second, 0));
    assertThrows(
        IllegalArgumentException.class, () -> new RetryPolicy(2, second, 1, second.negated(), 0));
  }

  @Test
  void recoversWithinTheResumeTimeout() {
    Recovery recovery = new Recovery(POINT.resumeTimeout(), nowNs::get);
    PenstockException lost = failure(Status.Code.UNAVAILABLE, "");
    assertTrue(recovery.delayAfter(lost, POINT).isPresent());
    assertTrue(recovery.isUnderWay());
    nowNs.set(Duration.ofSeconds(11).toNanos());
    assertTrue(recovery.delayAfter(lost, POINT).isEmpty());
    assertFalse(recovery.isUnderWay());
  }

  @Test
  void progressRestartsTheResumeTimeout() {
    Recovery recovery = new Recovery(POINT.resumeTimeout(), nowNs::get);
    PenstockException lost = failure(Status.Code.UNAVAILABLE, "");
    recovery.delayAfter(lost, POINT);
    nowNs.set(Duration.ofSeconds(11).toNanos());
    ResumePoint later = new ResumePoint(FakeServer.ID, 6, List.of(5), POINT.resumeTimeout());
    assertTrue(recovery.delayAfter(lost, later).isPresent());
  }

  @Test
  void otherFailuresAreReturnedUnchanged() {
    Recovery recovery = new Recovery(POINT.resumeTimeout(), nowNs::get);
    PenstockException invalid = failure(Status.Code.INVALID_ARGUMENT, "");
    assertTrue(recovery.delayAfter(invalid, POINT).isEmpty());
    PenstockException engineDown = failure(Status.Code.UNAVAILABLE, "ENGINE_DOWN");
    assertTrue(recovery.delayAfter(engineDown, POINT).isEmpty());
    PenstockException lost = failure(Status.Code.UNAVAILABLE, "");
    assertTrue(new Recovery(Duration.ZERO, nowNs::get).delayAfter(lost, POINT).isEmpty());
  }

  @Test
  void aForgottenRequestIsReportedAsLost() {
    Recovery recovery = new Recovery(POINT.resumeTimeout(), nowNs::get);
    PenstockException lost = failure(Status.Code.UNAVAILABLE, "");
    recovery.delayAfter(lost, POINT);
    PenstockException forgotten = failure(Status.Code.NOT_FOUND, "REQUEST_NOT_FOUND");
    assertSame(lost, recovery.explain(forgotten));
  }
}
