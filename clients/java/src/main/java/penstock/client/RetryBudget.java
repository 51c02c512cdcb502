package penstock.client;

/**
 * Bounds the retries of all calls of a client together: over any stretch, retries are at most the
 * reserve and a share of the calls in it. A bound per call does not bound a crowd. After the retry
 * budget of Finagle and "Addressing Cascading Failures" in Site Reliability Engineering (O'Reilly,
 * 2016), here without a clock.
 */
final class RetryBudget {
  private static final int CALLS_FOR_A_RETRY = 5;
  private static final int RESERVE = 100 * CALLS_FOR_A_RETRY;

  private int left = RESERVE;

  /** A call began. */
  synchronized void payIn() {
    left = Math.min(RESERVE, left + 1);
  }

  /** Whether there may be one more retry. */
  synchronized boolean take() {
    if (left < CALLS_FOR_A_RETRY) {
      return false;
    }
    left -= CALLS_FOR_A_RETRY;
    return true;
  }
}
