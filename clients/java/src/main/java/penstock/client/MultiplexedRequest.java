package penstock.client;

import io.grpc.Metadata;
import io.grpc.Status;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.MultiplexCredit;
import dev.penstock.v1.MultiplexRequest;

/**
 * One request on a Multiplex call: its messages that were received and not taken yet, and its
 * credit. The number of these messages is limited by the credit.
 */
final class MultiplexedRequest implements Source {
  private final MultiplexCall call;
  private final long key;
  private final CallTerms terms;
  private final int topUp;
  private final BlockingQueue<Item> items = new LinkedBlockingQueue<>();
  private int numTaken;

  private sealed interface Item {
    record Message(GenerateResponse message) implements Item {}

    /** Called at the end of the request. Failure is null after an end without an error. */
    record End(PenstockException failure) implements Item {}
  }

  /**
   * Creates a request. TopUp is the number of tokens that are taken before credit is granted for
   * them; 0 leaves the credit to the caller.
   */
  MultiplexedRequest(MultiplexCall call, long key, CallTerms terms, int topUp) {
    this.call = call;
    this.key = key;
    this.terms = terms;
    this.topUp = topUp;
  }

  long key() {
    return key;
  }

  boolean isCreditManual() {
    return topUp == 0;
  }

  void put(GenerateResponse message) {
    items.add(new Item.Message(message));
    if (message.hasFinished()) {
      items.add(new Item.End(null));
    }
  }

  void fail(PenstockException failure) {
    items.add(new Item.End(failure));
  }

  @Override
  public GenerateResponse receive() {
    Item item = take();
    if (item instanceof Item.Message answer) {
      giveCredit(answer.message());
      return answer.message();
    }
    items.add(item);  // The end is returned again by the next call.
    PenstockException failure = ((Item.End) item).failure();
    if (failure != null) {
      throw failure;
    }
    return null;
  }

  @Override
  public Metadata headers() {
    return new Metadata();
  }

  @Override
  public void stop() {
    call.leave(this);
    fail(new PenstockException(Status.Code.CANCELLED, "the client closed the stream"));
  }

  void cancel() {
    call.send(MultiplexCall.cancelCommand(key));
  }

  /** Removes the request without ending it. */
  void abandon() {
    call.abandon(this);
  }

  void grant(int numTokens) {
    MultiplexCredit credit =
        MultiplexCredit.newBuilder().setKey(key).setNumCreditTokens(numTokens).build();
    call.send(MultiplexRequest.newBuilder().setCredit(credit).build());
  }

  private Item take() {
    try {
      Item item = items.poll(Math.max(terms.leftNanos(), 0), TimeUnit.NANOSECONDS);
      if (item != null) {
        return item;
      }
    } catch (InterruptedException interruption) {
      call.leave(this);
      throw PenstockException.interrupted(interruption);
    }
    call.leave(this);
    return new Item.End(PenstockException.deadlineExceeded());
  }

  private void giveCredit(GenerateResponse message) {
    if (topUp == 0 || message.hasFinished()) {
      return;
    }
    numTaken += message.getTokens().getNumTokens();
    if (numTaken >= topUp) {
      grant(numTaken);
      numTaken = 0;
    }
  }
}
