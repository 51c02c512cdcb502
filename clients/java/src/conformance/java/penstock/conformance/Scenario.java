package penstock.conformance;

/** Checks one behaviour. It has failed if it throws an exception. */
@FunctionalInterface
interface Scenario {
  void run(Talk talk) throws Exception;
}
