package penstock.client;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.RequestInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import penstock.client.wire.ErrorInfo;

/** Creates a {@link PenstockException} from a status and its details. */
final class StatusReader {
  private static final String DOMAIN = "penstock.dev";
  private static final Metadata.Key<String> PUSHBACK =
      Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER);

  private String reason = "";
  private Map<String, String> metadata = Map.of();
  private Duration retryAfter = Duration.ZERO;
  private boolean isRetryForbidden;
  private final List<FieldViolation> fieldViolations = new ArrayList<>();
  private String requestId = "";

  private StatusReader() {}

  /**
   * Returns the failure of a call that ended with this status and these trailers (null for none).
   */
  static PenstockException ofCall(Status status, Metadata trailers) {
    StatusReader reader = new StatusReader();
    com.google.rpc.Status details =
        trailers == null ? null : StatusProto.fromStatusAndTrailers(status, trailers);
    if (details != null) {
      reader.readDetails(details.getDetailsList());
    }
    if (trailers != null) {
      reader.readPushback(trailers.get(PUSHBACK));
    }
    String message = status.getDescription() == null ? "" : status.getDescription();
    return reader.failure(status.getCode(), message, status.getCause());
  }

  /** Returns the failure of one request of a Multiplex call. */
  static PenstockException ofRequest(com.google.rpc.Status status) {
    StatusReader reader = new StatusReader();
    reader.readDetails(status.getDetailsList());
    Status.Code code = Status.fromCodeValue(status.getCode()).getCode();
    // Servers never send OK here. It must not look like a complete stream.
    boolean isKnown = code != Status.Code.OK;
    return reader.failure(isKnown ? code : Status.Code.UNKNOWN, status.getMessage(), null);
  }

  private PenstockException failure(Status.Code code, String message, Throwable cause) {
    PenstockException.Details details = new PenstockException.Details(
        reason, metadata, retryAfter, isRetryForbidden, fieldViolations, requestId);
    return new PenstockException(code, message, details, cause);
  }

  private void readDetails(List<Any> details) {
    for (Any detail : details) {
      try {
        read(detail);
      } catch (InvalidProtocolBufferException unreadable) {
        // A detail that cannot be parsed must not hide the status.
        continue;
      }
    }
  }

  private void read(Any detail) throws InvalidProtocolBufferException {
    String url = detail.getTypeUrl();
    ByteString value = detail.getValue();
    switch (url.substring(url.lastIndexOf('/') + 1)) {
      case "google.rpc.ErrorInfo" -> {
        ErrorInfo info = ErrorInfo.parseFrom(value);
        if (info.getDomain().equals(DOMAIN)) {
          reason = info.getReason();
          metadata = info.getMetadataMap();
        }
      }
      case "google.rpc.RetryInfo" -> {
        com.google.protobuf.Duration delay = RetryInfo.parseFrom(value).getRetryDelay();
        suggest(Duration.ofSeconds(delay.getSeconds(), delay.getNanos()));
      }
      case "google.rpc.BadRequest" -> {
        for (var each : BadRequest.parseFrom(value).getFieldViolationsList()) {
          fieldViolations.add(new FieldViolation(each.getField(), each.getDescription()));
        }
    }
      case "google.rpc.RequestInfo" -> requestId = RequestInfo.parseFrom(value).getRequestId();
      default -> {
        // A later release of the API may add details of other kinds.
      }
    }
  }

  /**
   * Reads the push-back of gRFC A6 in milliseconds. A negative or invalid value means that the call
   * must not be retried.
   */
  private void readPushback(String milliseconds) {
    if (milliseconds == null) {
      return;
    }
    try {
      int pushbackMs = Integer.parseInt(milliseconds);
      isRetryForbidden = pushbackMs < 0;
      suggest(Duration.ofMillis(pushbackMs));
    } catch (NumberFormatException unreadable) {
      isRetryForbidden = true;
    }
  }

  private void suggest(Duration delay) {
    if (delay.compareTo(retryAfter) > 0) {
      retryAfter = delay;
    }
  }
}
