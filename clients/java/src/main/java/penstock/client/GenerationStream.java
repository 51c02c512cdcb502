package penstock.client;

import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerateResponse;

/**
 * The answer to one request, message by message as they come.
 *
 * <pre>{@code
 * try (GenerationStream stream = client.generate(request)) {
 *   for (GenerateResponse response : stream) {
 *     System.out.print(response.getTokens().getText());
 *   }
 * }
 * }</pre>
 *
 * <p>A stream that ends without a {@link PenstockException} is complete: gaps, events in the wrong
 * order and an end without {@code finished} are failures. One thread reads; all other methods may
 * be called by others. It can be read once.
 */
public final class GenerationStream
    implements Iterable<GenerateResponse>, Iterator<GenerateResponse>, AutoCloseable {
  private final PenstockClient client;
  private final CallTerms terms;
  // Starts the request; null for a stream that was resumed.
  private final Supplier<Source> opener;
  private final Attempts attempts;
  private final Recovery recovery;
  private final Duration grace;
  private final CountDownLatch closing = new CountDownLatch(1);

  private GenerateResponse upcoming;
  private PenstockException failure;
  private volatile Source source;
  private volatile StreamReader reader;
  // Guarded by this, as is every change of source.
  private boolean hasEnded;
  private String givenId;

  GenerationStream(
      PenstockClient client, CallTerms terms, GenerateRequest request, Supplier<Source> opener) {
    this.client = client;
    this.terms = terms;
    this.opener = opener;
    com.google.protobuf.Duration told = request.getResumeTimeout();
    grace = Duration.ofSeconds(told.getSeconds(), told.getNanos());
    attempts = client.newAttempts();
    recovery = new Recovery(grace, System::nanoTime);
    reader = new StreamReader(grace);
    givenId = request.getRequestId();
    connect();
  }

  GenerationStream(PenstockClient client, CallTerms terms, ResumePoint point) {
    this.client = client;
    this.terms = terms;
    opener = null;
    grace = point.gracePeriod();
    attempts = client.newAttempts();
    recovery = Recovery.resumed(point, System::nanoTime);
    reader = new StreamReader(point);
    givenId = point.requestId();
    connect();
  }

  /** This stream, which can be read once. */
  @Override
  public Iterator<GenerateResponse> iterator() {
    return this;
  }

  /**
   * Waits for the next message; false when the stream is complete.
   *
   * @throws PenstockException when the request failed, the stream was closed, or the thread is
   *     interrupted
   */
  @Override
  public boolean hasNext() {
    if (upcoming == null && failure != null) {
      throw failure;
    }
    if (upcoming == null && !isOver()) {
      upcoming = advance();
    }
    return upcoming != null;
  }

  /**
   * The next message.
   *
   * @throws NoSuchElementException after the end
   * @throws PenstockException as {@link #hasNext}
   */
  @Override
  public GenerateResponse next() {
    if (!hasNext()) {
      throw new NoSuchElementException("the stream is complete");
    }
    GenerateResponse response = upcoming;
    upcoming = null;
    return response;
  }

  /** The pieces of text as they come, of all outputs. Reads the stream; closing it closes this. */
  public Stream<String> text() {
    return StreamSupport.stream(spliterator(), false)
        .filter(GenerateResponse::hasTokens)
        .map(response -> response.getTokens().getText())
        .onClose(this::close);
  }

  /**
   * Waits for the initial metadata of the attempt under way; that of a request of a {@link
   * Multiplex} is empty.
   */
  public Metadata headers() {
    return source.headers();
  }

  /** How far the stream was read, for {@link PenstockClient#resume}, here or elsewhere. */
  public ResumePoint point() {
    return reader.point();
  }

  /**
   * Asks the server to end the request; the stream then ends well, with FINISH_REASON_CANCELLED.
   *
   * @throws IllegalStateException while the request's id is not known
   * @throws PenstockException when the server does not take it
   */
  public void cancel() {
    if (source instanceof Lane lane) {
      lane.cancel();
      return;
    }
    String requestId = requestId();
    if (requestId.isEmpty()) {
      throw new IllegalStateException("the request's id is not known yet");
    }
    client.cancel(requestId, CallSettings.NONE.withMetadata(terms.settings().metadata()));
  }

  /**
   * Lets the server send more tokens of a request begun by {@link Multiplex#generateWithCredit}.
   *
   * @param numTokens at least 1
   */
  public void grant(int numTokens) {
    if (numTokens < 1) {
      throw new IllegalArgumentException("numTokens: must be at least 1, not " + numTokens);
    }
    if (!(source instanceof Lane lane) || !lane.isCreditByHand()) {
      throw new IllegalStateException("the stream was not begun by generateWithCredit");
    }
    lane.grant(numTokens);
  }

  /** Leaves the stream, which ends the request on the server if it has not ended. */
  @Override
  public void close() {
    end(true);
  }

  /**
   * Leaves the stream without ending the request: it lives on for its resume_timeout. Over a
   * {@link Multiplex} that period begins with the end of its call.
   */
  public void detach() {
    synchronized (this) {
      if (source instanceof Lane lane) {
        lane.abandon();
      }
    }
    end(false);
  }

  /** The next message, over as many attempts as it takes; null when all were reported. */
  private GenerateResponse advance() {
    while (true) {
      PenstockException failed;
      try {
        return receive();
      } catch (PenstockException problem) {
        failed = ownFailure(problem);
      }
      Optional<Duration> delay = delayAfter(failed);
      if (delay.isEmpty()) {
        failure = recovery.explain(failed);
        end(failure.code() == Status.Code.CANCELLED);
        throw failure;
      }
      source.stop();
      pause(delay.get());
      client.reconnect();
      connect();
    }
  }

  private GenerateResponse receive() {
    while (true) {
      GenerateResponse message = source.receive();
      GenerateResponse told = message == null ? reader.end() : reader.receive(message);
      if (message == null) {
        end(false);
      }
      if (told != null) {
        return told;
      }
    }
  }

  private Optional<Duration> delayAfter(PenstockException failed) {
    if (isOver() || client.isClosed() || Thread.currentThread().isInterrupted()) {
      return Optional.empty();
    }
    Optional<Duration> delay = recovery.delayAfter(failed, reader.point());
    if (delay.isPresent()) {
      return delay;
    }
    if (opener == null) {
      // To resume again costs nothing: nothing is delivered twice.
      return attempts.delayAfter(failed, terms);
    }
    if (reader.hasOutput()) {
      return Optional.empty();
    }
    delay = attempts.delayAfter(recovery.explain(failed), terms);
    if (delay.isPresent()) {
      reader = new StreamReader(grace);
    }
    return delay;
  }

  /** Waits, unless the stream is closed or its deadline passes before. */
  private void pause(Duration delay) {
    try {
      long waitNanos = Math.min(CallTerms.saturatedNanos(delay), terms.leftNanos());
      if (!closing.await(waitNanos, TimeUnit.NANOSECONDS)) {
        return;
      }
      failure = closed();
    } catch (InterruptedException interruption) {
      failure = PenstockException.interrupted(interruption).ofRequest(requestId());
      end(true);
    }
    throw failure;
  }

  /** Makes the next attempt; its failure is reported by the next receive. */
  private void connect() {
    Source opened;
    try {
      boolean isResume = opener == null || recovery.isUnderWay();
      opened = isResume ? client.openResume(reader.nextPoint(), terms) : opener.get();
    } catch (PenstockException problem) {
      opened = new Source.Failed(problem);
    }
    synchronized (this) {
      source = opened;
      if (!hasEnded) {
        return;
      }
    }
    opened.stop(); // it was closed meanwhile
  }

  /** Lets go of the stream; isLeft is whether no client wants what is left of it. */
  private void end(boolean isLeft) {
    synchronized (this) {
      if (hasEnded) {
        return;
      }
      hasEnded = true;
    }
    closing.countDown();
    source.stop();
    String requestId = requestId();
    if (isLeft && !grace.isZero() && !requestId.isEmpty()) {
      // The end of its call does not end this request.
      client.leave(requestId, terms);
    }
  }

  private boolean isOver() {
    boolean isEnded;
    synchronized (this) {
      isEnded = hasEnded;
    }
    if (isEnded && failure == null && !reader.isComplete()) {
      failure = closed();
      throw failure;
    }
    return isEnded;
  }

  private PenstockException closed() {
    String message = "the stream was closed";
    return new PenstockException(Status.Code.CANCELLED, message).ofRequest(requestId());
  }

  /** That the client was closed is reported as such, whatever gRPC makes of it. */
  private PenstockException ownFailure(PenstockException problem) {
    boolean isCut =
        problem.code() == Status.Code.CANCELLED || problem.code() == Status.Code.UNAVAILABLE;
    boolean isOurs = isCut && problem.reason().isEmpty() && client.isClosed();
    return (isOurs ? PenstockException.clientClosed() : problem).ofRequest(requestId());
  }

  private String requestId() {
    String told = reader.point().requestId();
    return told.isEmpty() ? givenId : told;
  }
}
