package penstock.client;

import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.ThreadLocalRandom;

/** The account of one logical call: how many of its attempts failed, and whether one is left. */
final class Attempts {
  private final RetryPolicy policy;
  private final RetryBudget budget;
  private int numFailed;

  Attempts(RetryPolicy policy, RetryBudget budget) {
    this.policy = policy;
    this.budget = budget;
    budget.payIn();
  }

  /** Counts a failed attempt: how long to wait before the next; empty for no next one. */
  Optional<Duration> delayAfter(PenstockException failure, CallTerms terms) {
    numFailed++;
    if (numFailed >= policy.maxAttempts() || !RetryPolicy.isPassing(failure)) {
      return Optional.empty();
    }
    double jitter = ThreadLocalRandom.current().nextDouble();
    Duration delay = policy.delay(failure, numFailed, jitter);
    if (CallTerms.saturatedNanos(delay) >= terms.leftNanos() || !budget.take()) {
      return Optional.empty();
    }
    return Optional.of(delay);
  }
}
