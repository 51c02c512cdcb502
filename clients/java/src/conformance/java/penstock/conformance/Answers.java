package penstock.conformance;

import static penstock.conformance.ExpectationFailed.require;
import static penstock.conformance.ScenarioInput.CALL;
import static penstock.conformance.ScenarioInput.PROMPT;
import static penstock.conformance.ScenarioInput.greedy;
import static penstock.conformance.ScenarioInput.joined;
import static penstock.conformance.ScenarioInput.textOf;

import dev.penstock.v1.ChatMessage;
import dev.penstock.v1.ContentPart;
import dev.penstock.v1.FinishReason;
import dev.penstock.v1.GenerateOnceResponse;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.RequestAccepted;
import dev.penstock.v1.RequestFinished;
import dev.penstock.v1.TokenDelta;
import dev.penstock.v1.TokenPrompt;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.Future;
import java.util.stream.IntStream;
import penstock.client.PenstockClient;
import penstock.client.TraceContext;

/** Scenarios about responses: streams, prompts, text and metadata. */
final class Answers {
  private static final int NUM_LARGE_TOKENS = 100_000;
  private static final String TEXT = "naïve 日本語 🚀";

  private Answers() {}

  static void streamInOrder(ScenarioInput input) {
    try (PenstockClient client = input.client();
         CheckedStream checked = new CheckedStream(client.generate(greedy(12).build(), CALL))) {
      RequestFinished finished = checked.untilEnd();
      RequestAccepted accepted = checked.untilAccepted();
      boolean isNamed = !accepted.getRequestId().isEmpty() && !accepted.getModel().isEmpty();
      require(isNamed, "accepted without names: " + accepted);
      require(checked.numTokens() == 12, checked.numTokens() + " tokens, not 12");
      int numReported = finished.getUsage().getNumCompletionTokens();
      require(numReported == 12, "usage reports " + numReported + " tokens, not 12");
      FinishReason reason = checked.finishReason();
      require(reason == FinishReason.FINISH_REASON_LENGTH, "the reason is " + reason);
    }
  }

  static void onceEqualsStream(ScenarioInput input) {
    try (PenstockClient client = input.client();
         CheckedStream checked = new CheckedStream(client.generate(greedy(32).build(), CALL))) {
      checked.untilEnd();
      String once = textOf(client.generateOnce(greedy(32).build(), CALL));
      requireSame(checked.text(), once);
      require(!once.isEmpty(), "there is no text");
    }
  }

  static void tokenPrompt(ScenarioInput input) {
    List<Integer> ids = IntStream.range(5, 25).boxed().toList();
    GenerateRequest.Builder request = greedy(12).setTokenPrompt(tokens(ids));
    request.getOutputBuilder().setReturnTokenIds(true);
    try (PenstockClient client = input.client();
         CheckedStream first = new CheckedStream(client.generate(request.build(), CALL));
         CheckedStream second = new CheckedStream(client.generate(request.build(), CALL))) {
      for (CheckedStream checked : List.of(first, second)) {
        int numReported = checked.untilEnd().getUsage().getNumPromptTokens();
        require(
            numReported == ids.size(), "usage reports " + numReported + " prompt tokens, not 20");
        require(checked.tokenIds().size() == 12, checked.tokenIds().size() + " token ids, not 12");
      }
      boolean isSame = first.tokenIds().equals(second.tokenIds());
      require(isSame, first.tokenIds() + " the first time, then " + second.tokenIds());
    }
  }

  static void chat(ScenarioInput input) {
    GenerateRequest.Builder request = greedy(24);
    request.getChatPromptBuilder()
        .addMessages(message("system", "You answer in one sentence."))
        .addMessages(message("user", "Where is the Globe?"));
    try (PenstockClient client = input.client();
         CheckedStream checked = new CheckedStream(client.generate(request.build(), CALL))) {
      checked.untilEnd();
      require(!checked.text().isEmpty(), "there is no text");
      require(checked.numTokens() == 24, checked.numTokens() + " tokens, not 24");
    }
  }

  static void utf8AcrossChunks(ScenarioInput input) throws Exception {
    GenerateRequest.Builder request = greedy(200);
    request.getTextPromptBuilder().setText(TEXT);
    GenerateRequest.Builder echoing = request.clone();
    echoing.getOutputBuilder().setEcho(true);
    request.getOutputBuilder().setMinChunkTokens(1);
    try (PenstockClient client = input.client();
         CheckedStream checked = new CheckedStream(client.generate(request.build(), CALL))) {
      Future<GenerateOnceResponse> concurrent =
          input.concurrently(() -> client.generateOnce(echoing.build(), CALL));
      checked.untilEnd();
      GenerateOnceResponse once = joined(concurrent);
      String echoed = once.getPrompt().getText();
      require(echoed.equals(TEXT), "the prompt came back as " + echoed);
      requireSame(checked.text(), textOf(once));
      boolean isAscii = checked.text().chars().allMatch(character -> character < 128);
      require(!isAscii, "the text has no character beyond ASCII");
      for (TokenDelta chunk : checked.chunks()) {
        // False for a lone surrogate.
        boolean isWhole = StandardCharsets.UTF_8.newEncoder().canEncode(chunk.getText());
        require(isWhole && chunk.getTextBytes().isValidUtf8(), "half a character in " + chunk);
      }
    }
  }

  static void largePrompt(ScenarioInput input) {
    List<Integer> ids =
        IntStream.range(0, NUM_LARGE_TOKENS).map(number -> 5 + number % 1000).boxed().toList();
    try (PenstockClient client = input.client();
         CheckedStream checked = new CheckedStream(
             client.generate(greedy(4).setTokenPrompt(tokens(ids)).build(), CALL))) {
      int numReported = checked.untilEnd().getUsage().getNumPromptTokens();
      require(numReported == NUM_LARGE_TOKENS, "usage reports " + numReported + " prompt tokens");
      require(checked.numTokens() == 4, checked.numTokens() + " tokens, not 4");
    }
  }

  static void metadata(ScenarioInput input) {
    TraceContext trace = TraceContext.begin();
    String traceId = trace.traceparent().split("-")[1];
    GenerateRequest request = greedy(4).setRequestId(ScenarioInput.newId()).build();
    try (PenstockClient client = input.client();
         CheckedStream checked =
             new CheckedStream(client.generate(request, CALL.withTrace(trace)))) {
      checked.untilEnd();
      String reported = checked.untilAccepted().getTraceId();
      require(traceId.equals(reported), "the trace id is " + reported + ", not " + traceId);
      String accepted = checked.untilAccepted().getRequestId();
      require(accepted.equals(request.getRequestId()), "accepted as " + accepted);
    }
  }

  static void requireSame(String text, String expected) {
    require(text.equals(expected), "'" + text + "' is not '" + expected + "'");
  }

  static GenerateRequest numbered(int number, int numTokens) {
    GenerateRequest.Builder request = greedy(numTokens);
    request.getTextPromptBuilder().setText(PROMPT + ", number " + number);
    return request.build();
  }

  private static TokenPrompt tokens(List<Integer> ids) {
    return TokenPrompt.newBuilder().addAllIds(ids).build();
  }

  private static ChatMessage message(String role, String content) {
    return ChatMessage.newBuilder()
        .setRole(role)
        .addParts(ContentPart.newBuilder().setText(content))
        .build();
  }
}
