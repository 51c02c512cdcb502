package penstock.conformance;

import dev.penstock.v1.GenerateOnceResponse;
import dev.penstock.v1.GenerateRequest;
import java.time.Duration;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Future;
import penstock.client.CallSettings;
import penstock.client.PenstockClient;
import penstock.client.RetryPolicy;

/** Shared by the scenarios: the service, the driver, requests, and concurrent work. */
record ScenarioInput(String address, Driver driver, ExecutorService threads) {
  static final String PROMPT = "The old lighthouse keeper climbed the stairs";
  static final int LONG_TOKENS = 10_000;

  /** The deadline of calls that do not test deadlines; a scenario has 60 s. */
  static final CallSettings CALL = CallSettings.NONE.withDeadline(Duration.ofSeconds(50));

  /** The process that started this one. */
  interface Driver {
    void ready();

    void untilGo();
  }

  /** Returns a client with a separate connection and without retries. */
  PenstockClient client() {
    return client(RetryPolicy.NONE);
  }

  PenstockClient client(RetryPolicy retry) {
    return PenstockClient.builder(address).retry(retry).build();
  }

  /** Requests exactly this number of tokens, which depend only on the prompt. */
  static GenerateRequest.Builder greedy(int numTokens) {
    GenerateRequest.Builder request = GenerateRequest.newBuilder();
    request.getTextPromptBuilder().setText(PROMPT);
    request.getSamplingBuilder().setTemperature(0);
    request.getStoppingBuilder().setMaxTokens(numTokens).setIgnoreEos(true);
    return request;
  }

  /** Returns a unique request id. */
  static String newId() {
    return "conformance-" + UUID.randomUUID();
  }

  static String textOf(GenerateOnceResponse answer) {
    return answer.getOutputs(0).getText();
  }

  <T> Future<T> concurrently(Callable<T> work) {
    return threads.submit(work);
  }

  /** Returns the result of the concurrent work; throws its exception if it failed. */
  static <T> T joined(Future<T> work) throws Exception {
    try {
      return work.get();
    } catch (ExecutionException failed) {
      if (failed.getCause() instanceof Exception problem) {
        throw problem;
      }
      throw failed;
    }
  }
}
