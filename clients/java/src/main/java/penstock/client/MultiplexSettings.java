package penstock.client;

import java.time.Duration;

/**
 * Defines how requests share a call.
 *
 * @param windowTokens number of output tokens of a request that the server may send before they are
 *     read; at least twice min_chunk_tokens. It limits the memory for a slow reader, and should
 *     exceed the number of tokens generated in one round trip
 * @param maxCallAge time after which new requests use a new call. The old call ends with its last
 *     request, so that no call exceeds the maximum connection age of the server, by default about
 *     30 minutes
 * @param maxRequestBytes maximum size of a request. A larger request fails and is not sent, because
 *     it would end the call for all requests. At most the server's ModelLimits.max_message_bytes
 */
public record MultiplexSettings(int windowTokens, Duration maxCallAge, int maxRequestBytes) {
  /** 256 tokens, 20 minutes, 4 MiB. */
  public static final MultiplexSettings STANDARD =
      new MultiplexSettings(256, Duration.ofMinutes(20), 4 << 20);

  private static final int MAX_WINDOW_TOKENS = 1 << 20;

  /** Rejects invalid values. */
  public MultiplexSettings {
    if (windowTokens < 1 || windowTokens > MAX_WINDOW_TOKENS) {
      throw new IllegalArgumentException(
          "windowTokens: must be from 1 to " + MAX_WINDOW_TOKENS + ", not " + windowTokens);
    }
    if (maxCallAge.isNegative() || maxCallAge.isZero()) {
      throw new IllegalArgumentException("maxCallAge: must be positive, not " + maxCallAge);
    }
    if (maxRequestBytes < 1) {
      throw new IllegalArgumentException(
          "maxRequestBytes: must be at least 1, not " + maxRequestBytes);
    }
  }
}
