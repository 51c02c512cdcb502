package penstock.conformance;

import static penstock.conformance.Answers.numbered;
import static penstock.conformance.Answers.requireSame;
import static penstock.conformance.NotHeld.require;
import static penstock.conformance.Talk.CALL;
import static penstock.conformance.Talk.LONG_TOKENS;
import static penstock.conformance.Talk.greedy;
import static penstock.conformance.Talk.joined;
import static penstock.conformance.Talk.textOf;

import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Future;
import penstock.client.CallSettings;
import penstock.client.Multiplex;
import penstock.client.MultiplexSettings;
import penstock.client.PenstockClient;
import penstock.client.PenstockException;
import dev.penstock.v1.FinishReason;
import dev.penstock.v1.GenerateRequest;

/** The scenario about many requests on one Multiplex call. */
final class ManyOnOne {
  private static final int NUM_TEXTS = 6;
  private static final int NUM_AT_ONCE = 3;
  private static final int TEXT_TOKENS = 40;

  private ManyOnOne() {}

  static void multiplex(Talk talk) throws Exception {
    try (PenstockClient client = talk.client();
         Multiplex multiplex = client.multiplex(MultiplexSettings.STANDARD, CallSettings.NONE)) {
      textsAndAnError(talk, client, multiplex);
      cancel(multiplex);
      credit(multiplex);
    }
  }

  private static void textsAndAnError(Talk talk, PenstockClient client, Multiplex multiplex)
      throws Exception {
    List<Heard> all = new ArrayList<>();
    for (int number = 0; number < NUM_TEXTS; number++) {
      Heard heard = new Heard(multiplex.generate(numbered(number, TEXT_TOKENS), CALL));
      // One after the other: the queue has four places, and is looked at once in a step.
      heard.untilAccepted();
      all.add(heard);
    }
    GenerateRequest.Builder wrong = greedy(4);
    wrong.getSamplingBuilder().setTemperature(-1);
    try (Heard refused = new Heard(multiplex.generate(wrong.build(), CALL))) {
      refused.untilEnd();
      throw new NotHeld("temperature -1 was answered");
    } catch (PenstockException failure) {
      boolean isOfField = failure.code() == Status.Code.INVALID_ARGUMENT;
      require(isOfField, failure + ", not INVALID_ARGUMENT");
    }
    all.forEach(Heard::untilEnd);
    for (int first = 0; first < NUM_TEXTS; first += NUM_AT_ONCE) {
      List<Future<String>> texts = new ArrayList<>();
      for (int each = first; each < first + NUM_AT_ONCE; each++) {
        GenerateRequest request = numbered(each, TEXT_TOKENS);
        texts.add(talk.beside(() -> textOf(client.generateOnce(request, CALL))));
      }
      for (int each = 0; each < NUM_AT_ONCE; each++) {
        requireSame(all.get(first + each).text(), joined(texts.get(each)));
      }
    }
  }

  private static void cancel(Multiplex multiplex) {
    try (Heard heard = new Heard(multiplex.generate(greedy(LONG_TOKENS).build(), CALL))) {
      heard.untilTokens(1).stream().cancel();
      heard.untilEnd();
      FinishReason reason = heard.finishReason();
      boolean isCancelled = reason == FinishReason.FINISH_REASON_CANCELLED;
      require(isCancelled, "the cancelled one ended by " + reason);
    }
  }

  private static void credit(Multiplex multiplex) {
    // The end of the later one states that the one without credit had its chance.
    try (Heard credited = new Heard(multiplex.generateWithCredit(greedy(20).build(), 5, CALL));
         Heard later = new Heard(multiplex.generate(greedy(60).build(), CALL))) {
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
