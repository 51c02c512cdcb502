package penstock.client;

import io.grpc.Metadata;
import dev.penstock.v1.GenerateResponse;

/** One attempt at a stream. One thread reads; any thread may stop it. */
interface Source {
  /**
   * Returns the next message; null when the attempt has ended without an error. Throws
   * PenstockException.
   */
  GenerateResponse receive();

  /** Waits for the initial metadata. Throws PenstockException if there will be none. */
  Metadata headers();

  /** Stops the attempt. A thread that waits in receive is woken. */
  void stop();

  /** Returns an attempt that failed before it started. */
  record Failed(PenstockException failure) implements Source {
    @Override
    public GenerateResponse receive() {
      throw failure;
    }

    @Override
    public Metadata headers() {
      throw failure;
    }

    @Override
    public void stop() {
      // There is nothing to stop.
    }
  }
}
