package penstock.client;

/**
 * Limits the total number of retries of all calls of a client: over any period, retries are at most
 * the reserve plus a share of the calls in it. A limit per call does not limit the total. It is the
 * retry budget of Finagle and of "Addressing Cascading Failures" in Site Reliability Engineering
 * (O'Reilly, 2016), here without a clock.
 */
final class RetryBudget {
  private static final int CALLS_FOR_A_RETRY = 5;
  private static final int RESERVE = 100 * CALLS_FOR_A_RETRY;

  private int left = RESERVE;

  /** Counts a call that has started. */
  synchronized void deposit() {
    left = Math.min(RESERVE, left + 1);
  }

  /** Deducts one retry. Returns whether the budget had one. */
  synchronized boolean take() {
    if (left < CALLS_FOR_A_RETRY) {
      return false;
    }
    left -= CALLS_FOR_A_RETRY;
    return true;
  }
}
