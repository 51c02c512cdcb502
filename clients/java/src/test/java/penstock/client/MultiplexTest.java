package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.penstock.v1.ErrorReason;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.GenerationServiceGrpc;
import dev.penstock.v1.MultiplexEvent;
import dev.penstock.v1.MultiplexRequest;
import dev.penstock.v1.MultiplexResponse;
import dev.penstock.v1.MultiplexSubmit;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(20)
class MultiplexTest {
  private static final GenerateRequest REQUEST = FakeServer.request(Duration.ZERO);

  /** Passes all calls and commands to the test, which responds. */
  private static final class ManualService extends GenerationServiceGrpc.GenerationServiceImplBase {
    private final BlockingQueue<StreamObserver<MultiplexResponse>> calls =
        new LinkedBlockingQueue<>();
    private final BlockingQueue<MultiplexRequest> commands = new LinkedBlockingQueue<>();

    @Override
    public StreamObserver<MultiplexRequest> multiplex(StreamObserver<MultiplexResponse> answers) {
      calls.add(answers);
      return new StreamObserver<>() {
        @Override
        public void onNext(MultiplexRequest command) {
          commands.add(command);
        }

        @Override
        public void onError(Throwable failure) {}

        @Override
        public void onCompleted() {
          answers.onCompleted();
        }
      };
    }

    MultiplexSubmit submitted() throws InterruptedException {
      return commands.take().getSubmit();
    }
  }

  private final ManualService service = new ManualService();

  private static MultiplexResponse event(long key, GenerateResponse response) {
    return MultiplexResponse.newBuilder()
        .addEvents(MultiplexEvent.newBuilder().setKey(key).setResponse(response))
        .build();
  }

  private static Multiplex multiplex(FakeServer server, int windowTokens) {
    MultiplexSettings settings = new MultiplexSettings(windowTokens, Duration.ofMinutes(20), 1000);
    return server.client().multiplex(settings, CallSettings.NONE);
  }

  private static PenstockException failureOf(GenerationStream stream) {
    return assertThrows(PenstockException.class, () -> stream.forEachRemaining(each -> {}));
  }

  @Test
  void readingGivesCredit() throws Exception {
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex = multiplex(server, 2);
         GenerationStream stream = multiplex.generate(REQUEST)) {
      MultiplexSubmit submit = service.submitted();
      assertEquals(2, submit.getNumCreditTokens());
      StreamObserver<MultiplexResponse> answers = service.calls.take();
      answers.onNext(event(submit.getKey(), FakeServer.accepted()));
      answers.onNext(event(submit.getKey(), FakeServer.token(1)));
      answers.onNext(event(submit.getKey(), FakeServer.token(2)));
      for (int each = 0; each < 3; each++) {
        stream.next();
      }
      assertEquals(2, service.commands.take().getCredit().getNumCreditTokens());
      answers.onNext(event(submit.getKey(), FakeServer.finished(3)));
      assertEquals("", stream.text().collect(Collectors.joining()));
    }
  }

  @Test
  void leavingCancelsByKeyAndTheCallContinues() throws Exception {
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex = multiplex(server, 2);
         GenerationStream left = multiplex.generate(REQUEST)) {
      long key = service.submitted().getKey();
      left.close();
      assertEquals(key, service.commands.take().getCancel().getKey());
      try (GenerationStream stream = multiplex.generate(REQUEST)) {
        long next = service.submitted().getKey();
        StreamObserver<MultiplexResponse> answers = service.calls.take();
        answers.onNext(event(key, FakeServer.accepted()));  // It was already sent.
        answers.onNext(event(next, FakeServer.accepted()));
        answers.onNext(event(next, FakeServer.finished(1)));
        stream.forEachRemaining(each -> {});
      }
      assertTrue(service.calls.isEmpty());
    }
  }

  @Test
  void aLostCallFailsAllAndTheNextRequestOpensAnother() throws Exception {
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex = multiplex(server, 2)) {
      GenerationStream first = multiplex.generate(REQUEST);
      GenerationStream second = multiplex.generate(REQUEST);
      service.calls.take().onError(Status.UNAVAILABLE.asRuntimeException());
      assertEquals(Status.Code.UNAVAILABLE, failureOf(first).code());
      assertEquals(Status.Code.UNAVAILABLE, failureOf(second).code());
      service.commands.clear();
      try (GenerationStream third = multiplex.generate(REQUEST)) {
        long key = service.submitted().getKey();
        StreamObserver<MultiplexResponse> answers = service.calls.take();
        answers.onNext(event(key, FakeServer.accepted()));
        answers.onNext(event(key, FakeServer.finished(1)));
        third.forEachRemaining(each -> {});
      }
    }
  }

  @Test
  void aCallWhoseServerDrainsTakesNothingNew() throws Exception {
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex = multiplex(server, 2)) {
      GenerationStream rejected = multiplex.generate(REQUEST);
      long key = service.submitted().getKey();
      com.google.rpc.Status.Builder status =
          com.google.rpc.Status.newBuilder().setCode(Status.Code.UNAVAILABLE.value());
      penstock.client.wire.ErrorInfo info = penstock.client.wire.ErrorInfo.newBuilder()
                                                .setDomain("penstock.dev")
                                                .setReason("DRAINING")
                                                .build();
      status.addDetails(Details.packed("google.rpc.ErrorInfo", info));
      MultiplexEvent event = MultiplexEvent.newBuilder().setKey(key).setError(status).build();
      service.calls.take().onNext(MultiplexResponse.newBuilder().addEvents(event).build());
      assertTrue(failureOf(rejected).hasReason(ErrorReason.ERROR_REASON_DRAINING));
      multiplex.generate(REQUEST).close();
      service.calls.take();  // Another call.
    }
  }

  @Test
  void anEventOfAnUnknownKeyBreaksTheCall() throws Exception {
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex = multiplex(server, 2);
         GenerationStream stream = multiplex.generate(REQUEST)) {
      service.calls.take().onNext(event(77, FakeServer.accepted()));
      assertEquals(PenstockException.STREAM_BROKEN, failureOf(stream).reason());
    }
  }

  @Test
  void aRequestThatIsTooLargeFailsAlone() throws Exception {
    GenerateRequest.Builder large = REQUEST.toBuilder();
    large.getTextPromptBuilder().setText("x".repeat(1000));
    try (FakeServer server = new FakeServer(service, RetryPolicy.STANDARD);
         Multiplex multiplex = multiplex(server, 2);
         GenerationStream stream = multiplex.generate(large.build())) {
      assertEquals(Status.Code.RESOURCE_EXHAUSTED, failureOf(stream).code());
      assertTrue(service.calls.isEmpty());
    }
  }

  @Test
  void theDeadlineTravelsAndHoldsHere() throws Exception {
    CallSettings soon = CallSettings.NONE.withDeadline(Duration.ofMillis(50));
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex = multiplex(server, 2);
         GenerationStream stream = multiplex.generate(REQUEST, soon)) {
      MultiplexSubmit submit = service.submitted();
      assertTrue(submit.getGeneration().getScheduling().hasTotalTimeout());
      assertEquals(Status.Code.DEADLINE_EXCEEDED, failureOf(stream).code());
      assertEquals(submit.getKey(), service.commands.take().getCancel().getKey());
    }
  }

  @Test
  void closingEndsAll() throws Exception {
    try (FakeServer server = new FakeServer(service, RetryPolicy.STANDARD);
         Multiplex multiplex = multiplex(server, 2)) {
      GenerationStream open = multiplex.generate(REQUEST);
      multiplex.close();
      assertEquals(Status.Code.CANCELLED, failureOf(open).code());
      assertEquals(Status.Code.CANCELLED, failureOf(multiplex.generate(REQUEST)).code());
    }
  }

  @Test
  void metadataIsTheCallsBusiness() throws Exception {
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("x-any", Metadata.ASCII_STRING_MARSHALLER), "1");
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         Multiplex multiplex = multiplex(server, 2)) {
      CallSettings settings = CallSettings.NONE.withMetadata(metadata);
      assertThrows(IllegalArgumentException.class, () -> multiplex.generate(REQUEST, settings));
    }
  }
}
