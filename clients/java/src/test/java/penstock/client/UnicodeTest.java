package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.function.Executable;
import dev.penstock.v1.ChatMessage;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.GenerationServiceGrpc;
import dev.penstock.v1.MultiplexRequest;
import dev.penstock.v1.MultiplexResponse;
import dev.penstock.v1.TokenizeRequest;

@Timeout(20)
class UnicodeTest {
  private static final String HALF = "private \ud83d";

  /** Counts the calls that reach it. */
  private static final class Counting extends GenerationServiceGrpc.GenerationServiceImplBase {
    private final AtomicInteger numRequests = new AtomicInteger();

    @Override
    public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
      numRequests.incrementAndGet();
      FakeServer.answer(observer, 1);
    }

    @Override
    public StreamObserver<MultiplexRequest> multiplex(StreamObserver<MultiplexResponse> answers) {
      numRequests.incrementAndGet();
      return super.multiplex(answers);
    }
  }

  private static GenerateRequest request(String prompt) {
    GenerateRequest.Builder request = GenerateRequest.newBuilder();
    request.getTextPromptBuilder().setText(prompt);
    return request.build();
  }

  private static String rejectionOf(Executable call) {
    return assertThrows(IllegalArgumentException.class, call).getMessage();
  }

  @Test
  void halfPairsAreNamedWhereverTheyAre() {
    GenerateRequest.Builder conversation = GenerateRequest.newBuilder();
    ChatMessage.Builder whole = conversation.getChatPromptBuilder().addMessagesBuilder();
    whole.setRole("user").addPartsBuilder().setText("\ud83d\ude80");
    Unicode.require(conversation.build());
    for (String half :
        List.of("\ud83d", "\ude80", "\ude80\ud83d", "\ud83d\ud83d\ude80", "\ud83da")) {
      GenerateRequest.Builder bad = conversation.build().toBuilder();
      ChatMessage.Builder broken = bad.getChatPromptBuilder().addMessagesBuilder();
      broken.setRole("user").addPartsBuilder().setText(half);
      assertEquals("chat_prompt.messages[1].parts[0].text: has an unpaired surrogate",
          rejectionOf(() -> Unicode.require(bad.build())));
    }
    conversation.getStoppingBuilder().addStopStrings("a").addStopStrings(HALF);
    assertEquals("stopping.stop_strings[1]: has an unpaired surrogate",
        rejectionOf(() -> Unicode.require(conversation.build())));
  }

  @Test
  void noCallSendsThem() throws Exception {
    Counting service = new Counting();
    GenerateRequest bad = request(HALF);
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex =
             server.client().multiplex(MultiplexSettings.STANDARD, CallSettings.NONE)) {
      PenstockClient client = server.client();
      TokenizeRequest.Builder words = TokenizeRequest.newBuilder();
      words.getTextPromptBuilder().setText(HALF);
      List<Executable> calls = List.of(()
                                           -> client.generate(bad),
          ()
              -> client.generateOnce(bad),
          ()
              -> multiplex.generate(bad),
          ()
              -> multiplex.generateWithCredit(bad, 1, CallSettings.NONE),
          () -> client.tokenize(words.build(), CallSettings.NONE));
      for (Executable call : calls) {
        assertEquals("text_prompt.text: has an unpaired surrogate", rejectionOf(call));
      }
      assertEquals("request_id: has an unpaired surrogate", rejectionOf(() -> client.cancel(HALF)));
      assertEquals(0, service.numRequests.get());
      try (GenerationStream stream = client.generate(request("\ud83d\ude80"))) {
        stream.forEachRemaining(each -> {});
        assertFalse(stream.hasNext());
      }
    }
  }

  @Test
  void aPointOfAnotherProcessIsLookedAtToo() throws Exception {
    try (FakeServer server = new FakeServer(new Counting(), RetryPolicy.NONE)) {
      ResumePoint point = new ResumePoint(HALF, 1, List.of(), Duration.ofSeconds(1));
      assertEquals(
          "request_id: has an unpaired surrogate",
          rejectionOf(() -> server.client().resume(point)));
    }
  }
}
