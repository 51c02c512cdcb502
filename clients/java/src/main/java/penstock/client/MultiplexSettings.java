package penstock.client;

import java.time.Duration;

/**
 * How requests share a call.
 *
 * @param windowTokens how many output tokens of a request the server may send beyond what was read;
 *     twice min_chunk_tokens where that is more. It bounds what a slow reader holds in memory, and
 *     should exceed what is generated in one round trip
 * @param maxCallAge after how long new requests go to a new call; the old one ends with its last
 *     request, so that no call outlives its connection, to which servers give 30 minutes
 * @param maxRequestBytes fails a larger request by itself: sent, it would end the call, and every
 *     request on it. Not more than the server's ModelLimits.max_message_bytes
 */
public record MultiplexSettings(int windowTokens, Duration maxCallAge, int maxRequestBytes) {
  /** 256 tokens, 20 minutes, 4 MiB. */
  public static final MultiplexSettings STANDARD =
      new MultiplexSettings(256, Duration.ofMinutes(20), 4 << 20);

  private static final int MAX_WINDOW_TOKENS = 1 << 20;

  /** Refuses values that make no sense. */
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
