package penstock.client;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.TokenDelta;

/**
 * Checks that a stream conforms to the protocol: order, sequence numbers, one end. Tracks the
 * position up to which it was read. Threads may share one.
 */
final class StreamReader {
  // The server has validated the number of outputs, but a wrong index must not allocate memory
  // here.
  private static final int MAX_OUTPUTS = 1 << 16;

  private final Duration resumeTimeout;
  private final List<Integer> receivedTokenCounts;
  private String requestId;
  private long nextSequence;
  private boolean hasOutput;
  private GenerateResponse finished;
  private boolean isComplete;

  StreamReader(Duration resumeTimeout) {
    this(new ResumePoint("", 0, List.of(), resumeTimeout));
  }

  StreamReader(ResumePoint point) {
    resumeTimeout = point.resumeTimeout();
    requestId = point.requestId();
    nextSequence = point.nextSequence();
    receivedTokenCounts = new ArrayList<>(point.receivedTokenCounts());
  }

  /**
   * Checks the next message. Holds {@code finished} back for {@link #end} and then returns null,
   * because {@code finished} is valid only if the status is OK.
   */
  synchronized GenerateResponse receive(GenerateResponse response) {
    if (finished != null) {
      throw PenstockException.streamBroken("received a message after finished");
    }
    long sequence = response.getSequence();
    if (sequence != nextSequence) {
      throw PenstockException.streamBroken(
          "expected message " + nextSequence + ", got " + sequence);
    }
    if ((sequence == 0) != response.hasAccepted()) {
      throw PenstockException.streamBroken("accepted must be the first message, once");
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
        // The caller skips unknown events.
      }
    }
    return response;
  }

  /** Returns the last message, after the stream has ended with status OK. */
  synchronized GenerateResponse end() {
    if (finished == null) {
      throw PenstockException.streamBroken(
          "the stream ended after " + nextSequence + " messages without finished");
    }
    nextSequence++;
    isComplete = true;
    return finished;
  }

  /** Returns whether the end was returned. */
  synchronized boolean isComplete() {
    return isComplete;
  }

  synchronized boolean hasOutput() {
    return hasOutput;
  }

  synchronized ResumePoint point() {
    return new ResumePoint(requestId, nextSequence, receivedTokenCounts, resumeTimeout);
  }

  /** Returns where the next attempt resumes: before a {@code finished} whose status was lost. */
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
