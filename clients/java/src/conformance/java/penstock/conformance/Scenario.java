package penstock.conformance;

/** Checks one thing; an exception is its failure. */
@FunctionalInterface
interface Scenario {
  void run(Talk talk) throws Exception;
}
