package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.penstock.v1.CancelRequest;
import dev.penstock.v1.CancelResponse;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.GenerationServiceGrpc;
import dev.penstock.v1.ResumeRequest;
import dev.penstock.v1.ResumeResponse;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.stub.ServerCallStreamObserver;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(20)
class GenerationStreamTest {
  private static final Duration RESUME_TIMEOUT = Duration.ofSeconds(30);
  private static final RetryPolicy QUICK =
      new RetryPolicy(3, Duration.ofNanos(1), 1, Duration.ofNanos(1), 0);

  /** Rejects this number of calls, then sends two tokens. */
  private static final class Rejecting extends GenerationServiceGrpc.GenerationServiceImplBase {
    private final int numRejections;
    private final AtomicInteger numCalls = new AtomicInteger();

    Rejecting(int numRejections) {
      this.numRejections = numRejections;
    }

    @Override
    public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
      if (numCalls.incrementAndGet() > numRejections) {
        FakeServer.answer(observer, 2);
        return;
      }
      observer.onNext(FakeServer.accepted());
      observer.onError(FakeServer.rejection(Status.Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"));
    }
  }

  /** Loses each stream after two messages; Resume sends the others. */
  private static final class Losing extends GenerationServiceGrpc.GenerationServiceImplBase {
    private final CompletableFuture<ResumeRequest> resumed = new CompletableFuture<>();
    private final CompletableFuture<String> cancelled = new CompletableFuture<>();

    @Override
    public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
      observer.onNext(FakeServer.accepted());
      observer.onNext(FakeServer.token(1));
      observer.onError(Status.UNAVAILABLE.asRuntimeException());
    }

    @Override
    public void resume(ResumeRequest request, StreamObserver<ResumeResponse> observer) {
      resumed.complete(request);
      observer.onNext(resumed(FakeServer.token(2)));
      observer.onNext(resumed(FakeServer.finished(3)));
      observer.onCompleted();
    }

    @Override
    public void cancel(CancelRequest request, StreamObserver<CancelResponse> observer) {
      cancelled.complete(request.getRequestId());
      observer.onNext(CancelResponse.getDefaultInstance());
      observer.onCompleted();
    }

    private static ResumeResponse resumed(GenerateResponse response) {
      return ResumeResponse.newBuilder().setResponse(response).build();
    }
  }

  /** Sends one token, then nothing. */
  private static final class Waiting extends GenerationServiceGrpc.GenerationServiceImplBase {
    private final CompletableFuture<Void> ended = new CompletableFuture<>();

    @Override
    public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
      ((ServerCallStreamObserver<GenerateResponse>) observer)
          .setOnCancelHandler(() -> ended.complete(null));
      observer.onNext(FakeServer.accepted());
      observer.onNext(FakeServer.token(1));
    }
  }

  private static PenstockException failureOf(GenerationStream stream) {
    return assertThrows(PenstockException.class, () -> stream.forEachRemaining(each -> {}));
  }

  @Test
  void triesAgainUntilItIsServed() throws Exception {
    Rejecting service = new Rejecting(2);
    try (FakeServer server = new FakeServer(service, QUICK);
         GenerationStream stream = server.client().generate(FakeServer.request(Duration.ZERO))) {
      assertEquals("t1 t2 ", stream.text().collect(Collectors.joining()));
      assertEquals(3, service.numCalls.get());
    }
  }

  @Test
  void returnsTheRejectionWhenAttemptsEnd() throws Exception {
    Rejecting service = new Rejecting(5);
    try (FakeServer server = new FakeServer(service, QUICK);
         GenerationStream stream = server.client().generate(FakeServer.request(Duration.ZERO))) {
      PenstockException failure = failureOf(stream);
      assertEquals("QUEUE_FULL", failure.reason());
      assertEquals(FakeServer.ID, failure.requestId());
      assertEquals(3, service.numCalls.get());
      assertEquals(failure, assertThrows(PenstockException.class, stream::hasNext));
    }
  }

  @Test
  void neverTriesAgainAfterOutput() throws Exception {
    Losing service = new Losing();
    try (FakeServer server = new FakeServer(service, QUICK);
         GenerationStream stream = server.client().generate(FakeServer.request(Duration.ZERO))) {
      assertEquals(Status.Code.UNAVAILABLE, failureOf(stream).code());
      assertFalse(service.resumed.isDone());
    }
  }

  @Test
  void resumesByItselfWithinTheResumeTimeout() throws Exception {
    Losing service = new Losing();
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         GenerationStream stream = server.client().generate(FakeServer.request(RESUME_TIMEOUT))) {
      assertEquals("t1 t2 ", stream.text().collect(Collectors.joining()));
      ResumeRequest asked = service.resumed.get();
      assertEquals(2, asked.getNextSequence());
      assertEquals(List.of(1), asked.getReceivedTokenCountsList());
    }
    assertFalse(service.cancelled.isDone());
  }

  @Test
  void closingCancelsARequestThatWouldContinue() throws Exception {
    Losing service = new Losing();
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE);
         GenerationStream stream = server.client().generate(FakeServer.request(RESUME_TIMEOUT))) {
      stream.next();
      stream.close();
      assertEquals(FakeServer.ID, service.cancelled.get());
    }
  }

  @Test
  void detachingDoesNot() throws Exception {
    Losing service = new Losing();
    try (FakeServer server = new FakeServer(service, RetryPolicy.NONE)) {
      try (GenerationStream stream = server.client().generate(FakeServer.request(RESUME_TIMEOUT))) {
        stream.next();
        stream.detach();
        assertEquals(Status.Code.CANCELLED, failureOf(stream).code());
      }
      server.client().close();  // It waits for Cancel calls.
      assertFalse(service.cancelled.isDone());
    }
  }

  @Test
  void closingWakesTheReader() throws Exception {
    Waiting service = new Waiting();
    try (FakeServer server = new FakeServer(service, QUICK);
         GenerationStream stream = server.client().generate(FakeServer.request(Duration.ZERO))) {
      stream.next();
      stream.next();
      CompletableFuture<PenstockException> reader =
          CompletableFuture.supplyAsync(() -> failureOf(stream));
      stream.close();
      assertEquals(Status.Code.CANCELLED, reader.get().code());
      service.ended.get();
    }
  }

  @Test
  void anInterruptEndsTheRequest() throws Exception {
    Waiting service = new Waiting();
    try (FakeServer server = new FakeServer(service, QUICK);
         GenerationStream stream = server.client().generate(FakeServer.request(Duration.ZERO))) {
      stream.next();
      stream.next();
      Thread.currentThread().interrupt();
      assertEquals(Status.Code.CANCELLED, failureOf(stream).code());
      assertTrue(Thread.interrupted());
      service.ended.get();
    }
  }

  @Test
  void theEndOfTheContextEndsTheRequest() throws Exception {
    Waiting service = new Waiting();
    try (FakeServer server = new FakeServer(service, QUICK)) {
      Context.CancellableContext context = Context.current().withCancellation();
      GenerationStream stream =
          context.call(() -> server.client().generate(FakeServer.request(Duration.ZERO)));
      stream.next();
      context.cancel(null);
      assertEquals(Status.Code.CANCELLED, failureOf(stream).code());
      service.ended.get();
    }
  }

  @Test
  void aClosedClientIsReportedAsSuch() throws Exception {
    try (FakeServer server = new FakeServer(new Waiting(), QUICK)) {
      GenerationStream stream = server.client().generate(FakeServer.request(RESUME_TIMEOUT));
      stream.next();
      server.client().close();
      assertEquals("the client was closed", failureOf(stream).getMessage());
    }
  }

  @Test
  void theDeadlineHoldsOverAllAttempts() throws Exception {
    CallSettings soon = CallSettings.NONE.withDeadline(Duration.ofMillis(50));
    try (FakeServer server = new FakeServer(new Waiting(), QUICK);
         GenerationStream stream =
             server.client().generate(FakeServer.request(Duration.ZERO), soon)) {
      assertEquals(Status.Code.DEADLINE_EXCEEDED, failureOf(stream).code());
    }
  }
}
