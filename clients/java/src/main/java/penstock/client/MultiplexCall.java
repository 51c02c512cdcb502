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
 * One Multiplex call and its open requests, by key, which handle their events.
 *
 * <p>gRPC buffers commands while the connection is slow. The buffer cannot become larger than the
 * open requests.
 */
final class MultiplexCall extends ClientCall.Listener<MultiplexResponse> {
  private final PenstockClient client;
  private final Duration maxAge;
  private final Consumer<MultiplexCall> onEnd;
  private final ClientCall<MultiplexRequest, MultiplexResponse> call;
  private final long beganNs = System.nanoTime();

  // Protected by the lock.
  private final Map<Long, MultiplexedRequest> requests = new HashMap<>();
  private final Set<Long> left = new HashSet<>();  // abandoned, and not ended by the server yet
  private long lastKey;
  private boolean isRetired;  // accepts no new requests, and ends with its last one
  private boolean isHalfClosed;
  private boolean isClosed;
  private boolean hasAnswer;
  private PenstockException broken;
  private PenstockException end;

  MultiplexCall(PenstockClient client, Duration maxAge, Consumer<MultiplexCall> onEnd) {
    this.client = client;
    this.maxAge = maxAge;
    this.onEnd = onEnd;
    // The context of one request must not end the call of all requests.
    Context caller = Context.ROOT.attach();
    try {
      call =
          client.channel().newCall(GenerationServiceGrpc.getMultiplexMethod(), CallOptions.DEFAULT);
    } finally {
      Context.ROOT.detach(caller);
    }
  }

  /** Starts the call. Called once. */
  void open(Metadata headers) {
    call.start(this, headers);
    call.request(1);
  }

  /** Starts a request. Returns null if this call accepts no new requests. */
  synchronized MultiplexedRequest submit(
      MultiplexSubmit.Builder submit, CallTerms terms, int topUp) {
    boolean isOld = lastKey > 0 && System.nanoTime() - beganNs >= maxAge.toNanos();
    // The failure of the call has more details than the failure of the next request would have.
    if (end != null && lastKey == 0) {
      throw end;
    }
    if (end != null || isRetired || isClosed || isOld) {
      return null;
    }
    lastKey++;
    MultiplexedRequest request = new MultiplexedRequest(this, lastKey, terms, topUp);
    requests.put(request.key(), request);
    call.sendMessage(Multiplex.command(submit.setKey(request.key())));
    return request;
  }

  /** Makes the call accept no new requests. */
  synchronized void retire() {
    isRetired = true;
    endIfUnused();
  }

  /** Sends a command for a request. Ignored if the request has ended. */
  synchronized void send(MultiplexRequest command) {
    if (!isHalfClosed && end == null) {
      call.sendMessage(command);
    }
  }

  /** Removes a request that is no longer read, and cancels it if it is still open. */
  synchronized void leave(MultiplexedRequest request) {
    if (abandon(request)) {
      send(cancelCommand(request.key()));
    }
  }

  /** Removes a request without ending it. Returns whether it was still open. */
  synchronized boolean abandon(MultiplexedRequest request) {
    boolean isOpen = requests.remove(request.key(), request);
    if (isOpen) {
      left.add(request.key());
    }
    return isOpen;
  }

  /** Ends the call with all its requests. */
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
    } catch (PenstockException invalid) {
      broken = invalid;
      call.cancel(invalid.getMessage(), invalid);
      return;
    }
    endIfUnused();
    call.request(1);
  }

  @Override
  public void onClose(Status status, Metadata trailers) {
    synchronized (this) {
      end = failure(status, trailers);
      requests.values().forEach(request -> request.fail(end));
      requests.clear();
    }
    onEnd.accept(this);
  }

  // Requires the lock.
  private void receive(MultiplexEvent event) {
    long key = event.getKey();
    boolean isFinal = event.hasError() || event.getResponse().hasFinished();
    MultiplexedRequest request = isFinal ? requests.remove(key) : requests.get(key);
    if (request == null) {
      boolean isLeft = isFinal ? left.remove(key) : left.contains(key);
      if (!isLeft) {
        throw PenstockException.streamBroken("an event of key " + key + ", which is not open");
      }
    } else if (event.hasError()) {
      PenstockException failure = StatusReader.ofRequest(event.getError());
      isRetired |= failure.hasReason(ErrorReason.ERROR_REASON_DRAINING);
      request.fail(failure);
    } else if (event.hasResponse()) {
      request.put(event.getResponse());
    }
  }

  /** Closes the sending side of a retired call after its last request. Requires the lock. */
  private void endIfUnused() {
    if (isRetired && !isHalfClosed && requests.isEmpty() && end == null) {
      isHalfClosed = true;
      call.halfClose();
    }
  }

  // Requires the lock.
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
    return hasAnswer ? failure : failure.cancelledToUnavailable();
  }
}
