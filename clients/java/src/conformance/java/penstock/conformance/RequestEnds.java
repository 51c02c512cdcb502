package penstock.conformance;

import static penstock.conformance.Answers.requireSame;
import static penstock.conformance.ExpectationFailed.require;
import static penstock.conformance.ScenarioInput.CALL;
import static penstock.conformance.ScenarioInput.LONG_TOKENS;
import static penstock.conformance.ScenarioInput.greedy;
import static penstock.conformance.ScenarioInput.joined;
import static penstock.conformance.ScenarioInput.textOf;

import dev.penstock.v1.ErrorReason;
import dev.penstock.v1.FinishReason;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.RequestState;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.Future;
import penstock.client.CallSettings;
import penstock.client.PenstockClient;
import penstock.client.PenstockException;
import penstock.client.ResumePoint;
import penstock.client.RetryPolicy;

/** Scenarios about the end of requests, and about failures that they survive. */
final class RequestEnds {
  private static final long ENDED_WITHIN_NS = Duration.ofSeconds(20).toNanos();

  private RequestEnds() {}

  static void cancelAfterFirstToken(ScenarioInput input) {
    String id = ScenarioInput.newId();
    try (PenstockClient client = input.client()) {
      CheckedStream checked =
          new CheckedStream(client.generate(greedy(LONG_TOKENS).setRequestId(id).build(), CALL));
      checked.untilTokens(1).close();
      try {
        checked.untilEnd();
        throw new ExpectationFailed("a stream that was left ended well");
      } catch (PenstockException failure) {
        require(failure.code() == Status.Code.CANCELLED, failure + ", not CANCELLED");
      }
      untilFree(client, greedy(1).setRequestId(id).build());
    }
  }

  private static void untilFree(PenstockClient client, GenerateRequest request) {
    long beganNs = System.nanoTime();
    while (System.nanoTime() - beganNs < ENDED_WITHIN_NS) {
      try {
        client.generateOnce(request, CALL);
        return;
      } catch (PenstockException failure) {
        if (!failure.hasReason(ErrorReason.ERROR_REASON_REQUEST_ID_IN_USE)) {
          throw failure;
        }
      }
    }
    throw new ExpectationFailed("the request is still live 5 s after its call ended");
  }

  static void cancelById(ScenarioInput input) {
    String id = ScenarioInput.newId();
    try (PenstockClient client = input.client(); PenstockClient other = input.client();
         CheckedStream checked = new CheckedStream(
             client.generate(greedy(LONG_TOKENS).setRequestId(id).build(), CALL))) {
      checked.untilTokens(1);
      RequestState state = other.cancel(id, CALL);
      boolean isRunning = state == RequestState.REQUEST_STATE_PROCESSING;
      require(isRunning, "Cancel found it in " + state);
      checked.untilEnd();
      FinishReason reason = checked.finishReason();
      require(reason == FinishReason.FINISH_REASON_CANCELLED, "the reason is " + reason);
    }
  }

  static void deadline(ScenarioInput input) {
    CallSettings soon = CallSettings.NONE.withDeadline(Duration.ofSeconds(1));
    long beganNs = System.nanoTime();
    try (PenstockClient client = input.client();
         CheckedStream checked =
             new CheckedStream(client.generate(greedy(LONG_TOKENS).build(), soon))) {
      checked.untilEnd();
      throw new ExpectationFailed("it ended well");
    } catch (PenstockException failure) {
      boolean isLate = failure.code() == Status.Code.DEADLINE_EXCEEDED;
      require(isLate, failure + ", not DEADLINE_EXCEEDED");
      boolean isInTime = System.nanoTime() - beganNs < ENDED_WITHIN_NS;
      require(isInTime, "no end within 5 s");
    }
  }

  static void resume(ScenarioInput input) throws Exception {
    GenerateRequest.Builder request = greedy(200);
    request.getResumeTimeoutBuilder().setSeconds(30);
    PenstockClient lost = input.client();
    CheckedStream before = new CheckedStream(lost.generate(request.build(), CALL)).untilTokens(20);
    // The connection is lost and the stream is not closed, so nothing is cancelled.
    lost.close();
    require(!before.hasEnded(), "it had ended before it was cut");
    ResumePoint point = before.stream().point();
    try (PenstockClient client = input.client();
         CheckedStream after = new CheckedStream(client.resume(point, CALL))) {
      Future<String> once =
          input.concurrently(() -> textOf(client.generateOnce(greedy(200).build(), CALL)));
      after.untilEnd();
      requireSame(before.text() + after.text(), joined(once));
      int total = before.numTokens() + after.numTokens();
      require(total == 200, total + " tokens, not 200");
    }
  }

  static void engineKilled(ScenarioInput input) {
    RetryPolicy retry = RetryPolicy.STANDARD.withMaxAttempts(8);
    try (PenstockClient client = input.client(retry);
         CheckedStream checked = new CheckedStream(client.generate(greedy(200).build(), CALL))) {
      checked.untilTokens(1);
      input.driver().ready();
      checked.untilEnd();
      require(checked.numTokens() == 200, checked.numTokens() + " tokens, not 200");
      requireSame(checked.text(), textOf(client.generateOnce(greedy(200).build(), CALL)));
    }
  }

  static void drain(ScenarioInput input) throws Exception {
    try (PenstockClient client = input.client();
         CheckedStream checked = new CheckedStream(client.generate(greedy(300).build(), CALL))) {
      checked.untilTokens(1);
      input.driver().untilGo();
      try {
        client.generateOnce(greedy(4).build(), CALL);
        throw new ExpectationFailed("a new request was served");
      } catch (PenstockException failure) {
        require(failure.code() == Status.Code.UNAVAILABLE, failure + ", not UNAVAILABLE");
        boolean hasDelay =
            failure.reason().isEmpty() || failure.hasReason(ErrorReason.ERROR_REASON_DRAINING);
        require(hasDelay, "the reason is " + failure.reason());
      }
      checked.untilEnd();
      require(checked.numTokens() == 300, checked.numTokens() + " tokens, not 300");
    }
  }
}
