package penstock.conformance;

/** Checks one behaviour. It has failed if it throws an exception. */
@FunctionalInterface
interface Scenario {
  void run(ScenarioInput input) throws Exception;
}
