package penstock.client;

import io.grpc.BindableService;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.inprocess.InProcessChannelBuilder;
import io.grpc.inprocess.InProcessServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.UUID;
import penstock.client.wire.ErrorInfo;
import dev.penstock.v1.RequestAccepted;
import dev.penstock.v1.RequestFinished;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.TokenDelta;

/**
 * A service within the process of the test, a client of it, and the messages that services send.
 */
final class FakeServer implements AutoCloseable {
  static final String ID = "request-1";

  private final Server server;
  private final PenstockClient client;

  FakeServer(BindableService service, RetryPolicy retry) throws IOException {
    String name = UUID.randomUUID().toString();
    server = InProcessServerBuilder.forName(name).addService(service).build().start();
    ManagedChannel channel = InProcessChannelBuilder.forName(name).build();
    client = new PenstockClient(new ConnectionPool(List.of(channel), null), retry);
  }

  PenstockClient client() {
    return client;
  }

  @Override
  public void close() {
    client.close();
    server.shutdownNow();
  }

  static GenerateRequest request(Duration resumeTimeout) {
    GenerateRequest.Builder request = GenerateRequest.newBuilder();
    request.getTextPromptBuilder().setText("To be, or not");
    if (!resumeTimeout.isZero()) {
      request.getResumeTimeoutBuilder().setSeconds(resumeTimeout.getSeconds());
    }
    return request.build();
  }

  static GenerateResponse accepted() {
    return GenerateResponse.newBuilder()
        .setAccepted(RequestAccepted.newBuilder().setRequestId(ID))
        .build();
  }

  /** Returns one token. */
  static GenerateResponse token(long sequence) {
    TokenDelta tokens = TokenDelta.newBuilder().setText("t" + sequence + " ").setNumTokens(1).build();
    return GenerateResponse.newBuilder().setSequence(sequence).setTokens(tokens).build();
  }

  static GenerateResponse finished(long sequence) {
    return GenerateResponse.newBuilder()
        .setSequence(sequence)
        .setFinished(RequestFinished.getDefaultInstance())
        .build();
  }

  /** Returns all messages of a stream with this number of tokens. */
  static void answer(StreamObserver<GenerateResponse> observer, int numTokens) {
    observer.onNext(accepted());
    for (int each = 1; each <= numTokens; each++) {
      observer.onNext(token(each));
    }
    observer.onNext(finished(numTokens + 1));
    observer.onCompleted();
  }

  /** Returns an error with a reason of the API. */
  static StatusRuntimeException rejection(Status.Code code, String reason) {
    ErrorInfo info = ErrorInfo.newBuilder().setDomain("penstock.dev").setReason(reason).build();
    com.google.rpc.Status status = com.google.rpc.Status.newBuilder()
                                       .setCode(code.value())
                                       .setMessage("rejected")
                                       .addDetails(Details.packed("google.rpc.ErrorInfo", info))
                                       .build();
    return StatusProto.toStatusRuntimeException(status, new Metadata());
  }
}
