package penstock.client;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.TokenDelta;

/**
 * Checks that a stream keeps the contract: order, sequence numbers, one end. Knows how far it was
 * read, and not where it comes from. Threads may share one.
 */
final class StreamReader {
  // The server has checked how many outputs there are; a wild index must not cost memory here.
  private static final int MAX_OUTPUTS = 1 << 16;

  private final Duration gracePeriod;
  private final List<Integer> receivedTokenCounts;
  private String requestId;
  private long nextSequence;
  private boolean hasOutput;
  private GenerateResponse finished;
  private boolean isComplete;

  StreamReader(Duration gracePeriod) {
    this(new ResumePoint("", 0, List.of(), gracePeriod));
  }

  StreamReader(ResumePoint point) {
    gracePeriod = point.gracePeriod();
    requestId = point.requestId();
    nextSequence = point.nextSequence();
    receivedTokenCounts = new ArrayList<>(point.receivedTokenCounts());
  }

  /**
   * Takes the next message. Holds {@code finished} back for {@link #end}, and then answers null: it
   * counts only once the status is OK.
   */
  synchronized GenerateResponse receive(GenerateResponse response) {
    if (finished != null) {
      throw PenstockException.streamBroken("a message came after finished");
    }
    long sequence = response.getSequence();
    if (sequence != nextSequence) {
      throw PenstockException.streamBroken(
          "expected message " + nextSequence + ", got " + sequence);
    }
    if ((sequence == 0) != response.hasAccepted()) {
      throw PenstockException.streamBroken("accepted must come first, and once");
    }
    if (response.hasFinished()) {
      finished = response;
      return null;
    }
    nextSequence++;
    switch (response.getEventCase()) {
      case ACCEPTED -> requestId = response.getAccepted().getRequestId();
      case PROMPT -> hasOutput = true;
      case TOKENS -> count(response.getTokens());
      default -> {
        // Events that are not known are the caller's to skip.
      }
    }
    return response;
  }

  /** The last message, once the stream ended with status OK. */
  synchronized GenerateResponse end() {
    if (finished == null) {
      throw PenstockException.streamBroken(
          "the stream ended after " + nextSequence + " messages without finished");
    }
    nextSequence++;
    isComplete = true;
    return finished;
  }

  /** Whether the end was reported. */
  synchronized boolean isComplete() {
    return isComplete;
  }

  synchronized boolean hasOutput() {
    return hasOutput;
  }

  synchronized ResumePoint point() {
    return new ResumePoint(requestId, nextSequence, receivedTokenCounts, gracePeriod);
  }

  /** Where the next attempt resumes: before a {@code finished} whose status was lost. */
  synchronized ResumePoint nextPoint() {
    finished = null;
    return point();
  }

  private void count(TokenDelta tokens) {
    hasOutput = true;
    int index = tokens.getOutputIndex();
    if (index < 0 || index >= MAX_OUTPUTS) {
      return;
    }
    while (receivedTokenCounts.size() <= index) {
      receivedTokenCounts.add(0);
    }
    receivedTokenCounts.set(index, receivedTokenCounts.get(index) + tokens.getNumTokens());
  }
}
