package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.rpc.BadRequest;
import com.google.rpc.RequestInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import penstock.client.wire.ErrorInfo;

class StatusReaderTest {
  private static final Metadata.Key<String> PUSHBACK =
      Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER);

  private static PenstockException read(Status.Code code, Metadata trailers, Any... details) {
    com.google.rpc.Status.Builder status =
        com.google.rpc.Status.newBuilder().setCode(code.value()).setMessage("why");
    status.addAllDetails(List.of(details));
    StatusRuntimeException failed = StatusProto.toStatusRuntimeException(status.build(), trailers);
    return StatusReader.ofCall(failed.getStatus(), failed.getTrailers());
  }

  private static Any errorInfo(String domain) {
    ErrorInfo.Builder info = ErrorInfo.newBuilder().setDomain(domain).setReason("QUEUE_FULL");
    return Details.packed("google.rpc.ErrorInfo", info.putMetadata("estimate_ms", "7").build());
  }

  @Test
  void readsEveryDetail() {
    RetryInfo.Builder retry = RetryInfo.newBuilder();
    retry.getRetryDelayBuilder().setSeconds(1).setNanos(500_000_000);
    BadRequest.Builder bad = BadRequest.newBuilder();
    bad.addFieldViolationsBuilder().setField("sampling.top_p").setDescription("too large");
    RequestInfo request = RequestInfo.newBuilder().setRequestId("a").build();
    PenstockException failure = read(Status.Code.RESOURCE_EXHAUSTED, new Metadata(),
        errorInfo("penstock.dev"), Details.packed("google.rpc.RetryInfo", retry.build()),
        Details.packed("google.rpc.BadRequest", bad.build()),
        Details.packed("google.rpc.RequestInfo", request));
    assertEquals(Status.Code.RESOURCE_EXHAUSTED, failure.code());
    assertEquals("QUEUE_FULL", failure.reason());
    assertEquals(Map.of("estimate_ms", "7"), failure.metadata());
    assertEquals(Duration.ofMillis(1500), failure.retryAfter());
    assertEquals(
        List.of(new FieldViolation("sampling.top_p", "too large")), failure.fieldViolations());
    assertEquals("a", failure.requestId());
    assertEquals("PenstockException: RESOURCE_EXHAUSTED (QUEUE_FULL): why", failure.toString());
  }

  @Test
  void leavesOutWhatIsNotTheContracts() {
    Any unreadable = Any.newBuilder()
                         .setTypeUrl("type.googleapis.com/google.rpc.RetryInfo")
                         .setValue(ByteString.copyFromUtf8("\u0007"))
                         .build();
    Metadata none = new Metadata();
    PenstockException failure =
        read(Status.Code.UNAVAILABLE, none, unreadable, errorInfo("elsewhere"));
    assertEquals("", failure.reason());
    assertEquals(Duration.ZERO, failure.retryAfter());
    assertEquals(Status.Code.UNAVAILABLE, failure.code());
  }

  @Test
  void theLongerWaitCounts() {
    Metadata trailers = new Metadata();
    trailers.put(PUSHBACK, "2500");
    RetryInfo.Builder retry = RetryInfo.newBuilder();
    retry.getRetryDelayBuilder().setSeconds(2);
    Any detail = Details.packed("google.rpc.RetryInfo", retry.build());
    PenstockException failure = read(Status.Code.UNAVAILABLE, trailers, detail);
    assertEquals(Duration.ofMillis(2500), failure.retryAfter());
  }

  @Test
  void aNegativeOrUnreadablePushbackForbidsRetries() {
    for (String pushback : List.of("-1", "soon")) {
      Metadata trailers = new Metadata();
      trailers.put(PUSHBACK, pushback);
      PenstockException failure = read(Status.Code.UNAVAILABLE, trailers);
      assertTrue(failure.isRetryForbidden(), pushback);
      assertEquals(Duration.ZERO, failure.retryAfter());
    }
  }

  @Test
  void anOkOfOneRequestIsAFailure() {
    PenstockException failure = StatusReader.ofRequest(com.google.rpc.Status.getDefaultInstance());
    assertEquals(Status.Code.UNKNOWN, failure.code());
  }
}
