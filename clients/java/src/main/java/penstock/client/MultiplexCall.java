package penstock.client;

import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.function.Consumer;
import dev.penstock.v1.ErrorReason;
import dev.penstock.v1.GenerationServiceGrpc;
import dev.penstock.v1.MultiplexCancel;
import dev.penstock.v1.MultiplexEvent;
import dev.penstock.v1.MultiplexRequest;
import dev.penstock.v1.MultiplexResponse;
import dev.penstock.v1.MultiplexSubmit;

/**
 * One Multiplex call and the requests that are open on it. Knows their keys; what comes of them is
 * the business of their lanes.
 *
 * <p>Commands are buffered by gRPC while the connection is slow, which holds no more than the open
 * requests do.
 */
final class MultiplexCall extends ClientCall.Listener<MultiplexResponse> {
  private final PenstockClient client;
  private final Duration maxAge;
  private final Consumer<MultiplexCall> onEnd;
  private final ClientCall<MultiplexRequest, MultiplexResponse> call;
  private final long beganNs = System.nanoTime();

  // Guarded by this.
  private final Map<Long, Lane> lanes = new HashMap<>();
  private final Set<Long> left = new HashSet<>(); // not wanted here, and not ended by the server
  private long lastKey;
  private boolean isRetired; // takes no new requests, and ends with its last
  private boolean isHalfClosed;
  private boolean isClosed;
  private boolean hasAnswer;
  private PenstockException broken;
  private PenstockException end;

  MultiplexCall(PenstockClient client, Duration maxAge, Consumer<MultiplexCall> onEnd) {
    this.client = client;
    this.maxAge = maxAge;
    this.onEnd = onEnd;
    // The context of one request must not end the call of all.
    Context caller = Context.ROOT.attach();
    try {
      call =
          client.channel().newCall(GenerationServiceGrpc.getMultiplexMethod(), CallOptions.DEFAULT);
    } finally {
      Context.ROOT.detach(caller);
    }
  }

  /** Begins the call, once. */
  void open(Metadata headers) {
    call.start(this, headers);
    call.request(1);
  }

  /** Starts a request; null when this call takes no new ones. */
  synchronized Lane submit(MultiplexSubmit.Builder submit, CallTerms terms, int topUp) {
    boolean isOld = lastKey > 0 && System.nanoTime() - beganNs >= maxAge.toNanos();
    // A call that failed with its first request states more than the failure of the next one would.
    if (end != null && lastKey == 0) {
      throw end;
    }
    if (end != null || isRetired || isClosed || isOld) {
      return null;
    }
    lastKey++;
    Lane lane = new Lane(this, lastKey, terms, topUp);
    lanes.put(lane.key(), lane);
    call.sendMessage(Multiplex.command(submit.setKey(lane.key())));
    return lane;
  }

  /** Nothing new may join. */
  synchronized void retire() {
    isRetired = true;
    endIfUnused();
  }

  /** Sends a command about a lane; what comes too late is of no use to anyone. */
  synchronized void send(MultiplexRequest command) {
    if (!isHalfClosed && end == null) {
      call.sendMessage(command);
    }
  }

  /** Drops a lane that no client wants any more, and cancels its request if it is still open. */
  synchronized void leave(Lane lane) {
    if (abandon(lane)) {
      send(cancelCommand(lane.key()));
    }
  }

  /** Drops a lane without ending its request; whether it was still open. */
  synchronized boolean abandon(Lane lane) {
    boolean isOpen = lanes.remove(lane.key(), lane);
    if (isOpen) {
      left.add(lane.key());
    }
    return isOpen;
  }

  /** Ends the call, and all requests with it. */
  void close() {
    synchronized (this) {
      isClosed = true;
    }
    call.cancel("the Multiplex was closed", null);
  }

  static MultiplexRequest cancelCommand(long key) {
    MultiplexCancel cancel = MultiplexCancel.newBuilder().setKey(key).build();
    return MultiplexRequest.newBuilder().setCancel(cancel).build();
  }

  @Override
  public synchronized void onMessage(MultiplexResponse response) {
    hasAnswer = true;
    try {
      response.getEventsList().forEach(this::receive);
    } catch (PenstockException unfit) {
      broken = unfit;
      call.cancel(unfit.getMessage(), unfit);
      return;
    }
    endIfUnused();
    call.request(1);
  }

  @Override
  public void onClose(Status status, Metadata trailers) {
    synchronized (this) {
      end = failure(status, trailers);
      lanes.values().forEach(lane -> lane.fail(end));
      lanes.clear();
    }
    onEnd.accept(this);
  }

  // Needs the lock.
  private void receive(MultiplexEvent event) {
    long key = event.getKey();
    boolean isFinal = event.hasError() || event.getResponse().hasFinished();
    Lane lane = isFinal ? lanes.remove(key) : lanes.get(key);
    if (lane == null) {
      boolean isLeft = isFinal ? left.remove(key) : left.contains(key);
      if (!isLeft) {
        throw PenstockException.streamBroken("an event of key " + key + ", which is not open");
      }
    } else if (event.hasError()) {
      PenstockException failure = StatusReader.ofRequest(event.getError());
      isRetired |= failure.hasReason(ErrorReason.ERROR_REASON_DRAINING);
      lane.fail(failure);
    } else if (event.hasResponse()) {
      lane.put(event.getResponse());
    }
  }

  /** Closes the sending side of a retired call after its last request. Needs the lock. */
  private void endIfUnused() {
    if (isRetired && !isHalfClosed && lanes.isEmpty() && end == null) {
      isHalfClosed = true;
      call.halfClose();
    }
  }

  // Needs the lock.
  private PenstockException failure(Status status, Metadata trailers) {
    if (client.isClosed()) {
      return PenstockException.clientClosed();
    }
    if (isClosed) {
      return new PenstockException(Status.Code.CANCELLED, "the Multiplex was closed");
    }
    if (broken != null) {
      return broken;
    }
    if (status.isOk()) {
      String message = "the server ended the Multiplex call";
      return new PenstockException(Status.Code.UNAVAILABLE, message);
    }
    PenstockException failure = StatusReader.ofCall(status, trailers);
    if (failure.code() == Status.Code.UNIMPLEMENTED && failure.reason().isEmpty()) {
      String message = "the server does not offer Multiplex: use PenstockClient.generate";
      return new PenstockException(Status.Code.UNIMPLEMENTED, message);
    }
    return hasAnswer ? failure : failure.unlessAsked();
  }
}
