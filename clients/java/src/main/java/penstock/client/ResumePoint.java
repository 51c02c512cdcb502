package penstock.client;

import java.time.Duration;
import java.util.List;
import java.util.Objects;

/**
 * How far a request's stream was read: all that another process needs to continue with it.
 *
 * @param requestId the request, as {@code accepted} reported it
 * @param nextSequence the sequence of the next message
 * @param receivedTokenCounts the tokens of each output so far, by output_index
 * @param gracePeriod the request's resume_timeout: for as long the resumed stream makes lost
 *     connections good by itself; zero: it does not
 */
public record ResumePoint(
    String requestId, long nextSequence, List<Integer> receivedTokenCounts, Duration gracePeriod) {
  /** Refuses null. */
  public ResumePoint {
    Objects.requireNonNull(requestId, "requestId");
    Objects.requireNonNull(gracePeriod, "gracePeriod");
    receivedTokenCounts = List.copyOf(receivedTokenCounts);
  }
}
