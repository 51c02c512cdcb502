package penstock.client;

import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.MultiplexRequest;
import dev.penstock.v1.MultiplexSubmit;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/**
 * Sends many requests over one call. Opens another call if the current one is lost or too old, or
 * if the server is about to stop. It assigns the keys. Threads may share one.
 */
public final class Multiplex implements AutoCloseable {
  private final PenstockClient client;
  private final MultiplexSettings multiplex;
  private final CallSettings settings;
  // All calls that have not ended. Old ones continue until their last request ends.
  private final Set<MultiplexCall> calls = ConcurrentHashMap.newKeySet();
  // Protected by the lock.
  private MultiplexCall current;
  private boolean isClosed;

  Multiplex(PenstockClient client, MultiplexSettings multiplex, CallSettings settings) {
    if (settings.deadline() != null) {
      throw new IllegalArgumentException("settings: requests have deadlines, not their call");
    }
    this.client = client;
    this.multiplex = Objects.requireNonNull(multiplex, "multiplex");
    this.settings = settings;
  }

  /** Like {@link #generate(GenerateRequest, CallSettings)}, without settings. */
  public GenerationStream generate(GenerateRequest request) {
    return generate(request, CallSettings.NONE);
  }

  /**
   * Like {@link PenstockClient#generate}, over the shared call. The deadline is sent as
   * total_timeout; of the trace only traceparent is sent. Reading the stream grants credit for more
   * output, so a request that is not read does not block the others. Of the gRPC context only the
   * deadline applies.
   *
   * @throws IllegalArgumentException for metadata, which belongs to the call
   */
  public GenerationStream generate(GenerateRequest request, CallSettings settings) {
    int chunkTokens = request.getOutput().getMinChunkTokens();
    int window = Math.max(multiplex.windowTokens(), Math.min(chunkTokens, 1 << 20) * 2);
    return start(request, settings, window, window / 2 + 1);
  }

  /**
   * Leaves the credit to the caller: the server sends numTokens tokens, and more only after {@link
   * GenerationStream#grant}. A request without credit for too long fails with READER_STALLED.
   */
  public GenerationStream generateWithCredit(
      GenerateRequest request, int numTokens, CallSettings settings) {
    if (numTokens < 0) {
      throw new IllegalArgumentException("numTokens: must not be negative, but is " + numTokens);
    }
    return start(request, settings, numTokens, 0);
  }

  /** Ends all calls and all open requests with CANCELLED. */
  @Override
  public void close() {
    synchronized (this) {
      isClosed = true;
    }
    calls.forEach(MultiplexCall::close);
  }

  private GenerationStream start(
      GenerateRequest request, CallSettings settings, int credit, int topUp) {
    if (!settings.metadata().keys().isEmpty()) {
      throw new IllegalArgumentException("metadata: belongs to the call, not to one request");
    }
    Unicode.require(request);
    CallTerms terms = CallTerms.begin(settings);
    return new GenerationStream(
        client, terms, request, () -> submit(request, terms, credit, topUp));
  }

  private Source submit(GenerateRequest request, CallTerms terms, int credit, int topUp) {
    MultiplexSubmit.Builder submit = MultiplexSubmit.newBuilder()
                                         .setGeneration(withDeadline(request, terms))
                                         .setNumCreditTokens(credit);
    TraceContext trace = terms.settings().trace();
    if (trace != null) {
      submit.setTraceparent(trace.traceparent());
    }
    // The largest key, because the size must not depend on the key that the request gets.
    int numBytes = command(submit.setKey(-1)).getSerializedSize();
    if (numBytes > multiplex.maxRequestBytes()) {
      String message = "the request has %d bytes; the limit is %d".formatted(
          numBytes, multiplex.maxRequestBytes());
      throw new PenstockException(Status.Code.RESOURCE_EXHAUSTED, message);
    }
    synchronized (this) {
      MultiplexedRequest multiplexed =
          current == null ? null : current.submit(submit, terms, topUp);
      if (multiplexed == null) {
        multiplexed = replaceCall().submit(submit, terms, topUp);
      }
      return Objects.requireNonNull(multiplexed, "a new call takes requests");
    }
  }

  // Requires the lock.
  private MultiplexCall replaceCall() {
    if (isClosed) {
      throw new PenstockException(Status.Code.CANCELLED, "the Multiplex was closed");
    }
    if (current != null) {
      current.retire();
    }
    current = new MultiplexCall(client, multiplex.maxCallAge(), calls::remove);
    calls.add(current);
    current.open(new CallTerms(null, settings).headers());
    return current;
  }

  static MultiplexRequest command(MultiplexSubmit.Builder submit) {
    return MultiplexRequest.newBuilder().setSubmit(submit).build();
  }

  /** Returns the request with the deadline as its total_timeout, unless its own is earlier. */
  private static GenerateRequest withDeadline(GenerateRequest request, CallTerms terms) {
    if (terms.deadline() == null) {
      return request;
    }
    // It must be positive, and the deadline is about to pass.
    Duration left = Duration.ofNanos(Math.max(terms.leftNanos(), 1));
    if (request.getScheduling().hasTotalTimeout()) {
      com.google.protobuf.Duration requested = request.getScheduling().getTotalTimeout();
      if (Duration.ofSeconds(requested.getSeconds(), requested.getNanos()).compareTo(left) <= 0) {
        return request;
      }
    }
    GenerateRequest.Builder limited = request.toBuilder();
    limited.getSchedulingBuilder()
        .getTotalTimeoutBuilder()
        .setSeconds(left.getSeconds())
        .setNanos(left.getNano());
    return limited.build();
  }
}
