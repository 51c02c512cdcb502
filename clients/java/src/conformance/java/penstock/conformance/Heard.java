package penstock.conformance;

import static penstock.conformance.NotHeld.require;

import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;
import penstock.client.GenerationStream;
import penstock.v1.Accepted;
import penstock.v1.FinishReason;
import penstock.v1.Finished;
import penstock.v1.GenerateResponse;
import penstock.v1.TokenRecord;
import penstock.v1.Tokens;

/**
 * The messages of one stream as they are read, each checked against the one before. The client
 * refuses gaps by itself; this looks again, because that is what is tested.
 */
final class Heard implements AutoCloseable {
  private final GenerationStream stream;
  private final List<Tokens> chunks = new ArrayList<>();
  private long nextSequence;
  private Accepted accepted;
  private Finished finished;

  Heard(GenerationStream stream) {
    this.stream = stream;
    nextSequence = stream.point().nextSequence();
  }

  GenerationStream stream() {
    return stream;
  }

  Accepted untilAccepted() {
    while (accepted == null) {
      read();
    }
    return accepted;
  }

  Heard untilTokens(int num) {
    while (numTokens() < num) {
      read();
    }
    return this;
  }

  Finished untilEnd() {
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
    return chunks.stream().map(Tokens::getText).collect(Collectors.joining());
  }

  List<Tokens> chunks() {
    return chunks;
  }

  int numTokens() {
    return chunks.stream().mapToInt(Tokens::getNumTokens).sum();
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
        // Progress is not looked at.
      }
    }
  }
}
