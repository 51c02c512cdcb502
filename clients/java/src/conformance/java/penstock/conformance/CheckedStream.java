package penstock.conformance;

import static penstock.conformance.ExpectationFailed.require;

import dev.penstock.v1.FinishReason;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.RequestAccepted;
import dev.penstock.v1.RequestFinished;
import dev.penstock.v1.TokenDelta;
import dev.penstock.v1.TokenRecord;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;
import penstock.client.GenerationStream;

/**
 * The messages of one stream, each checked against the previous one. The client, which is under
 * test, checks for gaps itself; this checks again.
 */
final class CheckedStream implements AutoCloseable {
  private final GenerationStream stream;
  private final List<TokenDelta> chunks = new ArrayList<>();
  private long nextSequence;
  private RequestAccepted accepted;
  private RequestFinished finished;

  CheckedStream(GenerationStream stream) {
    this.stream = stream;
    nextSequence = stream.point().nextSequence();
  }

  GenerationStream stream() {
    return stream;
  }

  RequestAccepted untilAccepted() {
    while (accepted == null) {
      read();
    }
    return accepted;
  }

  CheckedStream untilTokens(int num) {
    while (numTokens() < num) {
      read();
    }
    return this;
  }

  RequestFinished untilEnd() {
    while (finished == null) {
      read();
    }
    require(!stream.hasNext(), "a message after finished");
    return finished;
  }

  boolean hasEnded() {
    return finished != null;
  }

  String text() {
    return chunks.stream().map(TokenDelta::getText).collect(Collectors.joining());
  }

  List<TokenDelta> chunks() {
    return chunks;
  }

  int numTokens() {
    return chunks.stream().mapToInt(TokenDelta::getNumTokens).sum();
  }

  List<Integer> tokenIds() {
    return chunks.stream()
        .flatMap(chunk -> chunk.getRecordsList().stream())
        .map(TokenRecord::getId)
        .toList();
  }

  FinishReason finishReason() {
    return finished.getOutputs(0).getFinishReason();
  }

  @Override
  public void close() {
    stream.close();
  }

  private void read() {
    require(stream.hasNext(), "the stream ended without finished");
    GenerateResponse response = stream.next();
    long sequence = response.getSequence();
    require(sequence == nextSequence, "sequence " + sequence + ", not " + nextSequence);
    nextSequence++;
    boolean isAccepted = response.hasAccepted();
    require(isAccepted == (sequence == 0), "message " + sequence + " is " + response);
    switch (response.getEventCase()) {
      case ACCEPTED -> accepted = response.getAccepted();
      case TOKENS -> chunks.add(response.getTokens());
      case FINISHED -> finished = response.getFinished();
      default -> {
        // Progress events are ignored.
      }
    }
  }
}
