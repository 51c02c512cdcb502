package penstock.conformance;

import java.time.Duration;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Future;
import penstock.client.CallSettings;
import penstock.client.PenstockClient;
import penstock.client.RetryPolicy;
import dev.penstock.v1.GenerateOnceResponse;
import dev.penstock.v1.GenerateRequest;

/** What the scenarios share: the service, the driver, requests, work next to the scenario's own. */
record Talk(String address, Driver driver, ExecutorService threads) {
  static final String PROMPT = "The old lighthouse keeper climbed the stairs";
  static final int LONG_TOKENS = 10_000;

  /** The deadline of calls that are not about deadlines; a scenario has 60 s. */
  static final CallSettings CALL = CallSettings.NONE.withDeadline(Duration.ofSeconds(50));

  /** The process that started this one. */
  interface Driver {
    void ready();

    void untilGo();
  }

  /** A client with a separate connection, which reports every failure at once. */
  PenstockClient client() {
    return client(RetryPolicy.NONE);
  }

  PenstockClient client(RetryPolicy retry) {
    return PenstockClient.builder(address).retry(retry).build();
  }

  /** Exactly so many tokens, a function of the prompt. */
  static GenerateRequest.Builder greedy(int numTokens) {
    GenerateRequest.Builder request = GenerateRequest.newBuilder();
    request.getTextPromptBuilder().setText(PROMPT);
    request.getSamplingBuilder().setTemperature(0);
    request.getStoppingBuilder().setMaxTokens(numTokens).setIgnoreEos(true);
    return request;
  }

  /** A request id that no client else has. */
  static String newId() {
    return "conformance-" + UUID.randomUUID();
  }

  static String textOf(GenerateOnceResponse answer) {
    return answer.getOutputs(0).getText();
  }

  <T> Future<T> beside(Callable<T> work) {
    return threads.submit(work);
  }

  /** What the work next to came to; its failure is thrown as it was. */
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
