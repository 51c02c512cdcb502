package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.TokenDelta;
import java.time.Duration;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

class StreamReaderTest {
  private final StreamReader reader = new StreamReader(Duration.ofSeconds(3));

  private static void assertBroken(Executable step) {
    PenstockException failure = assertThrows(PenstockException.class, step);
    assertEquals(PenstockException.STREAM_BROKEN, failure.reason());
  }

  @Test
  void returnsFinishedOnlyAtTheEnd() {
    reader.receive(FakeServer.accepted());
    assertFalse(reader.hasOutput());
    reader.receive(FakeServer.token(1));
    assertTrue(reader.hasOutput());
    assertNull(reader.receive(FakeServer.finished(2)));
    assertFalse(reader.isComplete());
    assertEquals(2, reader.end().getSequence());
    assertTrue(reader.isComplete());
  }

  @Test
  void readsFinishedAgainWhenItsStatusWasLost() {
    reader.receive(FakeServer.accepted());
    assertNull(reader.receive(FakeServer.finished(1)));
    assertEquals(1, reader.nextPoint().nextSequence());
    assertBroken(reader::end);
    assertNull(reader.receive(FakeServer.finished(1)));
    assertEquals(1, reader.end().getSequence());
    assertEquals(2, reader.point().nextSequence());
  }

  @Test
  void countsTokensByOutput() {
    reader.receive(FakeServer.accepted());
    TokenDelta second = TokenDelta.newBuilder().setOutputIndex(1).setNumTokens(3).build();
    reader.receive(GenerateResponse.newBuilder().setSequence(1).setTokens(second).build());
    reader.receive(FakeServer.token(2));
    TokenDelta wild = TokenDelta.newBuilder().setOutputIndex(-1).setNumTokens(3).build();
    reader.receive(GenerateResponse.newBuilder().setSequence(3).setTokens(wild).build());
    ResumePoint expected = new ResumePoint(FakeServer.ID, 4, List.of(1, 3), Duration.ofSeconds(3));
    assertEquals(expected, reader.point());
  }

  @Test
  void rejectsWhatBreaksTheOrder() {
    assertBroken(() -> reader.receive(FakeServer.token(0)));
    assertBroken(() -> reader.receive(FakeServer.token(1)));
    reader.receive(FakeServer.accepted());
    assertBroken(() -> reader.receive(FakeServer.accepted()));
    assertBroken(() -> reader.receive(FakeServer.token(2)));
    assertBroken(reader::end);
    reader.receive(FakeServer.finished(1));
    assertBroken(() -> reader.receive(FakeServer.token(2)));
  }
}
