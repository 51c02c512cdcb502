package penstock.conformance;

import static penstock.conformance.Answers.numbered;
import static penstock.conformance.Answers.requireSame;
import static penstock.conformance.ExpectationFailed.require;
import static penstock.conformance.ScenarioInput.CALL;
import static penstock.conformance.ScenarioInput.LONG_TOKENS;
import static penstock.conformance.ScenarioInput.greedy;
import static penstock.conformance.ScenarioInput.joined;
import static penstock.conformance.ScenarioInput.textOf;

import dev.penstock.v1.FinishReason;
import dev.penstock.v1.GenerateRequest;
import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Future;
import penstock.client.CallSettings;
import penstock.client.Multiplex;
import penstock.client.MultiplexSettings;
import penstock.client.PenstockClient;
import penstock.client.PenstockException;

/** The scenario about many requests on one Multiplex call. */
final class Multiplexing {
  private static final int NUM_TEXTS = 6;
  private static final int NUM_AT_ONCE = 3;
  private static final int TEXT_TOKENS = 40;

  private Multiplexing() {}

  static void multiplex(ScenarioInput input) throws Exception {
    try (PenstockClient client = input.client();
         Multiplex multiplex = client.multiplex(MultiplexSettings.STANDARD, CallSettings.NONE)) {
      textsAndAnError(input, client, multiplex);
      cancel(multiplex);
      credit(multiplex);
    }
  }

  private static void textsAndAnError(
      ScenarioInput input, PenstockClient client, Multiplex multiplex) throws Exception {
    List<CheckedStream> all = new ArrayList<>();
    for (int number = 0; number < NUM_TEXTS; number++) {
      CheckedStream checked =
          new CheckedStream(multiplex.generate(numbered(number, TEXT_TOKENS), CALL));
      // Submitted one by one, because the queue holds four requests and is processed once per step.
      checked.untilAccepted();
      all.add(checked);
    }
    GenerateRequest.Builder wrong = greedy(4);
    wrong.getSamplingBuilder().setTemperature(-1);
    try (CheckedStream rejected = new CheckedStream(multiplex.generate(wrong.build(), CALL))) {
      rejected.untilEnd();
      throw new ExpectationFailed("temperature -1 was answered");
    } catch (PenstockException failure) {
      boolean isOfField = failure.code() == Status.Code.INVALID_ARGUMENT;
      require(isOfField, failure + ", not INVALID_ARGUMENT");
    }
    all.forEach(CheckedStream::untilEnd);
    for (int first = 0; first < NUM_TEXTS; first += NUM_AT_ONCE) {
      List<Future<String>> texts = new ArrayList<>();
      for (int each = first; each < first + NUM_AT_ONCE; each++) {
        GenerateRequest request = numbered(each, TEXT_TOKENS);
        texts.add(input.concurrently(() -> textOf(client.generateOnce(request, CALL))));
      }
      for (int each = 0; each < NUM_AT_ONCE; each++) {
        requireSame(all.get(first + each).text(), joined(texts.get(each)));
      }
    }
  }

  private static void cancel(Multiplex multiplex) {
    try (CheckedStream checked =
             new CheckedStream(multiplex.generate(greedy(LONG_TOKENS).build(), CALL))) {
      checked.untilTokens(1).stream().cancel();
      checked.untilEnd();
      FinishReason reason = checked.finishReason();
      boolean isCancelled = reason == FinishReason.FINISH_REASON_CANCELLED;
      require(isCancelled, "the cancelled one ended by " + reason);
    }
  }

  private static void credit(Multiplex multiplex) {
    // When the later request has ended, the one without credit has had the time to end.
    try (CheckedStream credited =
             new CheckedStream(multiplex.generateWithCredit(greedy(20).build(), 5, CALL));
         CheckedStream later = new CheckedStream(multiplex.generate(greedy(60).build(), CALL))) {
      later.untilEnd();
      credited.untilTokens(5);
      int numBefore = credited.numTokens();
      require(numBefore == 5, numBefore + " tokens came for a credit of 5");
      credited.stream().grant(100);
      credited.untilEnd();
      int numAfter = credited.numTokens();
      require(numAfter == 20, numAfter + " tokens with credit, not 20");
    }
  }
}
