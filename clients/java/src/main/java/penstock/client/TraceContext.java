package penstock.client;

import io.grpc.Metadata;
import java.security.SecureRandom;
import java.util.HexFormat;
import java.util.Objects;

/**
 * The trace to which a call belongs: the headers of W3C Trace Context.
 *
 * @param traceparent the header with this name
 * @param tracestate the header with this name; empty for none
 */
public record TraceContext(String traceparent, String tracestate) {
  /** The trailer with the trace id of a rejected call. */
  public static final Metadata.Key<String> TRACE_ID = key("x-trace-id");

  private static final Metadata.Key<String> TRACEPARENT = key("traceparent");
  private static final Metadata.Key<String> TRACESTATE = key("tracestate");
  private static final SecureRandom RANDOM = new SecureRandom();

  /** Rejects null. The server checks the content of the headers. */
  public TraceContext {
    Objects.requireNonNull(traceparent, "traceparent");
    Objects.requireNonNull(tracestate, "tracestate");
  }

  /** Creates a trace context without a tracestate. */
  public TraceContext(String traceparent) {
    this(traceparent, "");
  }

  /** Starts a trace that is sampled, for programs without a tracer. */
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
