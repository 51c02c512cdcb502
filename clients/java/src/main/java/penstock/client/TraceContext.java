package penstock.client;

import io.grpc.Metadata;
import java.security.SecureRandom;
import java.util.HexFormat;
import java.util.Objects;

/**
 * Places a call in a distributed trace: the headers of W3C Trace Context.
 *
 * @param traceparent the header of this name
 * @param tracestate the header of this name; empty for none
 */
public record TraceContext(String traceparent, String tracestate) {
  /** The trailer with the trace id of a refused call. */
  public static final Metadata.Key<String> TRACE_ID = key("x-trace-id");

  private static final Metadata.Key<String> TRACEPARENT = key("traceparent");
  private static final Metadata.Key<String> TRACESTATE = key("tracestate");
  private static final SecureRandom RANDOM = new SecureRandom();

  /** Refuses null; what the headers state is the server's to judge. */
  public TraceContext {
    Objects.requireNonNull(traceparent, "traceparent");
    Objects.requireNonNull(tracestate, "tracestate");
  }

  /** Without a tracestate. */
  public TraceContext(String traceparent) {
    this(traceparent, "");
  }

  /** Begins a trace that is to be recorded, for programs without a tracer. */
  public static TraceContext begin() {
    byte[] ids = new byte[24];
    RANDOM.nextBytes(ids);
    String hex = HexFormat.of().formatHex(ids);
    return new TraceContext("00-" + hex.substring(0, 32) + "-" + hex.substring(32) + "-01");
  }

  void putInto(Metadata headers) {
    headers.discardAll(TRACEPARENT);
    headers.discardAll(TRACESTATE);
    headers.put(TRACEPARENT, traceparent);
    if (!tracestate.isEmpty()) {
      headers.put(TRACESTATE, tracestate);
    }
  }

  private static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }
}
