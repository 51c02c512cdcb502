package penstock.client;

import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import dev.penstock.v1.ErrorReason;

/**
 * A failed call: its status, and what the server's google.rpc details state.
 *
 * <p>What is empty was not reported: a proxy, the network and gRPC itself give no details.
 */
public final class PenstockException extends RuntimeException {
  /**
   * The reason of a failure that the client finds: a gap, a wrong order, no finished at the end.
   */
  public static final String STREAM_BROKEN = "STREAM_BROKEN";

  private static final long serialVersionUID = 1L;
  private static final String PREFIX = "ERROR_REASON_";

  private final Status.Code code;
  private final transient Details details;

  /** What the status carried besides its code. */
  record Details(String reason, Map<String, String> metadata, Duration retryAfter,
      boolean isRetryRefused, List<FieldViolation> fieldViolations, String requestId) {
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

  /** For catch blocks: the thread stays interrupted. */
  static PenstockException interrupted(InterruptedException cause) {
    Thread.currentThread().interrupt();
    return new PenstockException(
        Status.Code.CANCELLED, "the thread was interrupted", Details.NONE, cause);
  }

  static PenstockException deadlineExceeded() {
    return new PenstockException(Status.Code.DEADLINE_EXCEEDED, "the deadline of the call passed");
  }

  /** The status code of gRPC. */
  public Status.Code code() {
    return code;
  }

  /** A name of {@link ErrorReason} without its prefix, such as {@code QUEUE_FULL}; or empty. */
  public String reason() {
    return details().reason;
  }

  /** Whether the failure has this reason of the contract. */
  public boolean hasReason(ErrorReason reason) {
    return reason().equals(reason.name().substring(PREFIX.length()));
  }

  /** What ErrorInfo carried besides the reason. */
  public Map<String, String> metadata() {
    return details().metadata;
  }

  /** How long the server suggests to wait before the next attempt; zero for no suggestion. */
  public Duration retryAfter() {
    return details().retryAfter;
  }

  /** Whether the server asked not to be tried again. */
  public boolean isRetryRefused() {
    return details().isRetryRefused;
  }

  /** The bad fields of the request. */
  public List<FieldViolation> fieldViolations() {
    return details().fieldViolations;
  }

  /** The id of the request, once it is known; or empty. */
  public String requestId() {
    return details().requestId;
  }

  /** Code, reason and message. */
  @Override
  public String toString() {
    String named = reason().isEmpty() ? code.name() : code.name() + " (" + reason() + ")";
    return "PenstockException: " + named + ": " + getMessage();
  }

  /** The same failure with the id of its request, in case the status did not report. */
  PenstockException ofRequest(String requestId) {
    Details told = details();
    if (requestId.isEmpty() || !told.requestId.isEmpty()) {
      return this;
    }
    Details known = new Details(told.reason, told.metadata, told.retryAfter, told.isRetryRefused,
        told.fieldViolations, requestId);
    return new PenstockException(code, getMessage(), known, this);
  }

  /**
   * A call that a client else cancelled before it began counts as not served. A server that shuts
   * down does so with calls that reach it in the same moment, and gives no reason.
   */
  PenstockException unlessAsked() {
    if (code != Status.Code.CANCELLED || !reason().isEmpty()) {
      return this;
    }
    String message = "the call was cancelled on its way, and not by this client";
    return new PenstockException(Status.Code.UNAVAILABLE, message, details(), this);
  }

  // A failure that was serialized comes back without its details.
  private Details details() {
    return details == null ? Details.NONE : details;
  }
}
