package penstock.client;

import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerateResponse;
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

/**
 * The response to one request, message by message as they arrive.
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
 * order, and an end without the {@code finished} event are failures. One thread reads the stream,
 * and it can be read only once. Other threads may call all other methods.
 */
public final class GenerationStream
    implements Iterable<GenerateResponse>, Iterator<GenerateResponse>, AutoCloseable {
  private final PenstockClient client;
  private final CallTerms terms;
  // Starts the request; null for a stream that was resumed.
  private final Supplier<Source> opener;
  private final Attempts attempts;
  private final Recovery recovery;
  private final Duration resumeTimeout;
  private final CountDownLatch closing = new CountDownLatch(1);

  private GenerateResponse upcoming;
  private PenstockException failure;
  private volatile Source source;
  private volatile StreamReader reader;
  // Protected by the lock of this object, like each change of source.
  private boolean hasEnded;
  private String givenId;

  GenerationStream(
      PenstockClient client, CallTerms terms, GenerateRequest request, Supplier<Source> opener) {
    this.client = client;
    this.terms = terms;
    this.opener = opener;
    com.google.protobuf.Duration timeout = request.getResumeTimeout();
    resumeTimeout = Duration.ofSeconds(timeout.getSeconds(), timeout.getNanos());
    attempts = client.newAttempts();
    recovery = new Recovery(resumeTimeout, System::nanoTime);
    reader = new StreamReader(resumeTimeout);
    givenId = request.getRequestId();
    connect();
  }

  GenerationStream(PenstockClient client, CallTerms terms, ResumePoint point) {
    this.client = client;
    this.terms = terms;
    opener = null;
    resumeTimeout = point.resumeTimeout();
    attempts = client.newAttempts();
    recovery = Recovery.resumed(point, System::nanoTime);
    reader = new StreamReader(point);
    givenId = point.requestId();
    connect();
  }

  /** Returns this stream, which can be read only once. */
  @Override
  public Iterator<GenerateResponse> iterator() {
    return this;
  }

  /**
   * Waits for the next message. Returns false if the stream is complete.
   *
   * @throws PenstockException if the request has failed, the stream was closed, or the thread is
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
   * Returns the next message.
   *
   * @throws NoSuchElementException after the end
   * @throws PenstockException like {@link #hasNext}
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

  /**
   * Returns the pieces of text of all outputs as they arrive. Reads this stream; closing the
   * returned stream closes this one.
   */
  public Stream<String> text() {
    return StreamSupport.stream(spliterator(), false)
        .filter(GenerateResponse::hasTokens)
        .map(response -> response.getTokens().getText())
        .onClose(this::close);
  }

  /**
   * Waits for the initial metadata of the current attempt. It is empty for a request of a {@link
   * Multiplex}.
   */
  public Metadata headers() {
    return source.headers();
  }

  /**
   * Returns the position up to which the stream was read, for {@link PenstockClient#resume} in this
   * or another process.
   */
  public ResumePoint point() {
    return reader.point();
  }

  /**
   * Ends the request on the server. The stream then ends without an error, with
   * FINISH_REASON_CANCELLED.
   *
   * @throws IllegalStateException while the id of the request is unknown
   * @throws PenstockException if the call fails
   */
  public void cancel() {
    if (source instanceof MultiplexedRequest multiplexed) {
      multiplexed.cancel();
      return;
    }
    String requestId = requestId();
    if (requestId.isEmpty()) {
      throw new IllegalStateException("the request's id is not known yet");
    }
    client.cancel(requestId, CallSettings.NONE.withMetadata(terms.settings().metadata()));
  }

  /**
   * Allows the server to send more tokens of a request started by {@link
   * Multiplex#generateWithCredit}.
   *
   * @param numTokens at least 1
   */
  public void grant(int numTokens) {
    if (numTokens < 1) {
      throw new IllegalArgumentException("numTokens: must be at least 1, not " + numTokens);
    }
    if (!(source instanceof MultiplexedRequest multiplexed) || !multiplexed.isCreditManual()) {
      throw new IllegalStateException("the stream was not started by generateWithCredit");
    }
    multiplexed.grant(numTokens);
  }

  /** Closes the stream, and cancels the request on the server if it has not ended. */
  @Override
  public void close() {
    end(true);
  }

  /**
   * Closes the stream without ending the request, which continues for its resume_timeout. Over a
   * {@link Multiplex} that time starts at the end of its call.
   */
  public void detach() {
    synchronized (this) {
      if (source instanceof MultiplexedRequest multiplexed) {
        multiplexed.abandon();
      }
    }
    end(false);
  }

  /** Returns the next message, over as many attempts as needed; null if all were returned. */
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
      GenerateResponse response = message == null ? reader.end() : reader.receive(message);
      if (message == null) {
        end(false);
      }
      if (response != null) {
        return response;
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
      // Resuming again is safe, because nothing is delivered twice.
      return attempts.delayAfter(failed, terms);
    }
    if (reader.hasOutput()) {
      return Optional.empty();
    }
    delay = attempts.delayAfter(recovery.explain(failed), terms);
    if (delay.isPresent()) {
      reader = new StreamReader(resumeTimeout);
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

  /** Makes the next attempt. The next receive reports its failure. */
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
    opened.stop();  // It was closed meanwhile.
  }

  /** Releases the stream. isLeft is true if the remaining stream will not be read. */
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
    if (isLeft && !resumeTimeout.isZero() && !requestId.isEmpty()) {
      // The end of the caller's context must not end this call.
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

  /** Reports that the client was closed, regardless of the error of gRPC. */
  private PenstockException ownFailure(PenstockException problem) {
    boolean isCut =
        problem.code() == Status.Code.CANCELLED || problem.code() == Status.Code.UNAVAILABLE;
    boolean isOurs = isCut && problem.reason().isEmpty() && client.isClosed();
    return (isOurs ? PenstockException.clientClosed() : problem).ofRequest(requestId());
  }

  private String requestId() {
    String acceptedId = reader.point().requestId();
    return acceptedId.isEmpty() ? givenId : acceptedId;
  }
}
