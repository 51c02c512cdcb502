package penstock.client;

import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.MultiplexRequest;
import dev.penstock.v1.MultiplexSubmit;

/**
 * Sends many requests over one call, and opens another when that is lost, grows old, or the server
 * is about to stop. Keys are its own business. Threads may share one.
 */
public final class Multiplex implements AutoCloseable {
  private final PenstockClient client;
  private final MultiplexSettings multiplex;
  private final CallSettings settings;
  // All calls that have not ended; old ones continue until their last request ends.
  private final Set<MultiplexCall> calls = ConcurrentHashMap.newKeySet();
  // Guarded by this.
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

  /** As {@link #generate(GenerateRequest, CallSettings)}, without settings. */
  public GenerationStream generate(GenerateRequest request) {
    return generate(request, CallSettings.NONE);
  }

  /**
   * As {@link PenstockClient#generate}, over the shared call. The deadline travels as
   * total_timeout; of the trace only traceparent does. Reading the stream gives credit for more
   * output, so a request that no client reads does not hold up the others. Of the gRPC context only
   * the deadline holds.
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
   * GenerationStream#grant}. A request left without credit for too long fails with READER_STALLED.
   */
  public GenerationStream generateWithCredit(
      GenerateRequest request, int numTokens, CallSettings settings) {
    if (numTokens < 0) {
      throw new IllegalArgumentException("numTokens: must not be negative, but is " + numTokens);
    }
    return start(request, settings, numTokens, 0);
  }

  /** Ends all calls, and so all open requests, with CANCELLED. */
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
    // The largest key there is: the size must not depend on which one it gets.
    int numBytes = command(submit.setKey(-1)).getSerializedSize();
    if (numBytes > multiplex.maxRequestBytes()) {
      String message = "the request has %d bytes, and may have %d".formatted(
          numBytes, multiplex.maxRequestBytes());
      throw new PenstockException(Status.Code.RESOURCE_EXHAUSTED, message);
    }
    synchronized (this) {
      Lane lane = current == null ? null : current.submit(submit, terms, topUp);
      if (lane == null) {
        lane = replaceCall().submit(submit, terms, topUp);
      }
      return Objects.requireNonNull(lane, "a new call takes requests");
    }
  }

  // Needs the lock.
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

  /** The request with the deadline as its total_timeout, unless that is earlier already. */
  private static GenerateRequest withDeadline(GenerateRequest request, CallTerms terms) {
    if (terms.deadline() == null) {
      return request;
    }
    // It must be positive, and this one is about to pass.
    Duration left = Duration.ofNanos(Math.max(terms.leftNanos(), 1));
    if (request.getScheduling().hasTotalTimeout()) {
      com.google.protobuf.Duration told = request.getScheduling().getTotalTimeout();
      if (Duration.ofSeconds(told.getSeconds(), told.getNanos()).compareTo(left) <= 0) {
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
