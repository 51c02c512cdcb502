package penstock.client;

import java.time.Duration;
import java.util.List;
import java.util.Objects;

/**
 * The position up to which the stream of a request was read. With it another process can continue
 * the stream.
 *
 * @param requestId the id of the request, which {@code accepted} reported
 * @param nextSequence the sequence number of the next message
 * @param receivedTokenCounts the number of tokens received of each output, by output_index
 * @param resumeTimeout the resume_timeout of the request. For this time after a loss, the resumed
 *     stream reconnects by itself; if it is zero, it does not reconnect
 */
public record ResumePoint(String requestId, long nextSequence, List<Integer> receivedTokenCounts,
    Duration resumeTimeout) {
  /** Rejects null. */
  public ResumePoint {
    Objects.requireNonNull(requestId, "requestId");
    Objects.requireNonNull(resumeTimeout, "resumeTimeout");
    receivedTokenCounts = List.copyOf(receivedTokenCounts);
  }
}
