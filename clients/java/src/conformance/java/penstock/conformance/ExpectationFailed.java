package penstock.conformance;

/** A condition of a scenario does not hold. */
final class ExpectationFailed extends RuntimeException {
  private static final long serialVersionUID = 1L;

  ExpectationFailed(String why) {
    super(why);
  }

  static void require(boolean holds, String why) {
    if (!holds) {
      throw new ExpectationFailed(why);
    }
  }
}
