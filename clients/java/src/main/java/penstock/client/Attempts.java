package penstock.client;

import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.ThreadLocalRandom;

/** Counts the failed attempts of one logical call, and decides whether another attempt is made. */
final class Attempts {
  private final RetryPolicy policy;
  private final RetryBudget budget;
  private int numFailed;

  Attempts(RetryPolicy policy, RetryBudget budget) {
    this.policy = policy;
    this.budget = budget;
    budget.deposit();
  }

  /**
   * Counts a failed attempt. Returns how long to wait before the next one; empty if there is none.
   */
  Optional<Duration> delayAfter(PenstockException failure, CallTerms terms) {
    numFailed++;
    if (numFailed >= policy.maxAttempts() || !RetryPolicy.isTransient(failure)) {
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
