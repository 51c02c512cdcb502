package penstock.client;

import dev.penstock.v1.ErrorReason;
import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;

/**
 * A failed call: its status, and the content of the server's google.rpc details.
 *
 * <p>Empty values were not reported: a proxy, the network and gRPC itself send no details.
 */
public final class PenstockException extends RuntimeException {
  /**
   * The reason of a failure that the client detects: a gap, events in the wrong order, or no {@code
   * finished} event at the end.
   */
  public static final String STREAM_BROKEN = "STREAM_BROKEN";

  private static final long serialVersionUID = 1L;
  private static final String PREFIX = "ERROR_REASON_";

  private final Status.Code code;
  private final transient Details details;

  /** The content of the status besides its code. */
  record Details(String reason, Map<String, String> metadata, Duration retryAfter,
      boolean isRetryForbidden, List<FieldViolation> fieldViolations, String requestId) {
    static final Details NONE = new Details("", Map.of(), Duration.ZERO, false, List.of(), "");

    Details {
      metadata = Map.copyOf(metadata);
      fieldViolations = List.copyOf(fieldViolations);
    }
  }

  PenstockException(Status.Code code, String message, Details details, Throwable cause) {
    super(message, cause);
    this.code = code;
    this.details = details;
  }

  PenstockException(Status.Code code, String message) {
    this(code, message, Details.NONE, null);
  }

  static PenstockException streamBroken(String message) {
    Details details = new Details(STREAM_BROKEN, Map.of(), Duration.ZERO, false, List.of(), "");
    return new PenstockException(Status.Code.DATA_LOSS, message, details, null);
  }

  static PenstockException clientClosed() {
    return new PenstockException(Status.Code.CANCELLED, "the client was closed");
  }

  /** For catch blocks. The thread stays interrupted. */
  static PenstockException interrupted(InterruptedException cause) {
    Thread.currentThread().interrupt();
    return new PenstockException(
        Status.Code.CANCELLED, "the thread was interrupted", Details.NONE, cause);
  }

  static PenstockException deadlineExceeded() {
    return new PenstockException(Status.Code.DEADLINE_EXCEEDED, "the deadline of the call passed");
  }

  /** Returns the gRPC status code. */
  public Status.Code code() {
    return code;
  }

  /**
   * Returns a name of {@link ErrorReason} without its prefix, such as {@code QUEUE_FULL}; or empty.
   */
  public String reason() {
    return details().reason;
  }

  /** Returns whether the failure has this error reason. */
  public boolean hasReason(ErrorReason reason) {
    return reason().equals(reason.name().substring(PREFIX.length()));
  }

  /** Returns the other values of ErrorInfo. */
  public Map<String, String> metadata() {
    return details().metadata;
  }

  /** Returns the delay that the server suggests before a retry; zero for no suggestion. */
  public Duration retryAfter() {
    return details().retryAfter;
  }

  /** Returns whether the server requested that the call is not retried. */
  public boolean isRetryForbidden() {
    return details().isRetryForbidden;
  }

  /** Returns the invalid fields of the request. */
  public List<FieldViolation> fieldViolations() {
    return details().fieldViolations;
  }

  /** Returns the id of the request if it is known; or empty. */
  public String requestId() {
    return details().requestId;
  }

  /** Returns code, reason and message. */
  @Override
  public String toString() {
    String named = reason().isEmpty() ? code.name() : code.name() + " (" + reason() + ")";
    return "PenstockException: " + named + ": " + getMessage();
  }

  /** Returns the same failure with the id of its request, in case the status does not have it. */
  PenstockException ofRequest(String requestId) {
    Details details = details();
    if (requestId.isEmpty() || !details.requestId.isEmpty()) {
      return this;
    }
    Details known = new Details(details.reason, details.metadata, details.retryAfter,
        details.isRetryForbidden, details.fieldViolations, requestId);
    return new PenstockException(code, getMessage(), known, this);
  }

  /**
   * Converts the error of a call that was cancelled before it began, and not by this client, to
   * UNAVAILABLE. A server that shuts down cancels calls that arrive at the same moment, without a
   * reason.
   */
  PenstockException cancelledToUnavailable() {
    if (code != Status.Code.CANCELLED || !reason().isEmpty()) {
      return this;
    }
    String message = "the server or a proxy cancelled the call, not this client";
    return new PenstockException(Status.Code.UNAVAILABLE, message, details(), this);
  }

  // The details are not serialized, so they are empty after deserialization.
  private Details details() {
    return details == null ? Details.NONE : details;
  }
}
