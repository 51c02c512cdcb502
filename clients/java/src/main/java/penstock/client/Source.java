package penstock.client;

import io.grpc.Metadata;
import dev.penstock.v1.GenerateResponse;

/** One attempt at a stream. One thread reads; any may stop it. */
interface Source {
  /** The next message; null once the attempt has ended well. Throws PenstockException. */
  GenerateResponse receive();

  /** Waits for the initial metadata. Throws PenstockException where none can come. */
  Metadata headers();

  /** Gives the attempt up; a caller that waits in receive is woken. */
  void stop();

  /** An attempt that failed before it began. */
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
      // There is nothing to give up.
    }
  }
}
