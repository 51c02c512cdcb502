package penstock.client;

import dev.penstock.v1.GenerateResponse;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.function.Function;

/**
 * A call with one request and many responses, with blocking reads. It buffers only responses that
 * were requested, so a slow reader slows down the call, and the server detects that.
 */
final class CallSource<M> implements Source {
  private static final int NUM_AHEAD = 16;

  private final ClientCall<?, M> call;
  private final Function<M, GenerateResponse> unwrap;
  private final BlockingQueue<Item<M>> items = new LinkedBlockingQueue<>();
  private final CompletableFuture<Metadata> headers = new CompletableFuture<>();
  private volatile boolean isStopped;
  private boolean hasAnswer;

  private sealed interface Item<M> {
    record Message<M>(M message) implements Item<M> {}

    record End<M>(Status status, Metadata trailers) implements Item<M> {}
  }

  private CallSource(ClientCall<?, M> call, Function<M, GenerateResponse> unwrap) {
    this.call = call;
    this.unwrap = unwrap;
  }

  static <R, M> Source open(Channel channel, MethodDescriptor<R, M> method, CallTerms terms,
      R request, Function<M, GenerateResponse> unwrap) {
    ClientCall<R, M> call = channel.newCall(method, terms.options());
    CallSource<M> source = new CallSource<>(call, unwrap);
    call.start(source.new Listener(), terms.headers());
    call.request(NUM_AHEAD);
    call.sendMessage(request);
    call.halfClose();
    return source;
  }

  @Override
  public GenerateResponse receive() {
    Item<M> item;
    try {
      item = items.take();
    } catch (InterruptedException interruption) {
      stop();
      throw PenstockException.interrupted(interruption);
    }
    if (item instanceof Item.Message<M> answer) {
      hasAnswer = true;
      call.request(1);
      return unwrap.apply(answer.message());
    }
    items.add(item);  // The end is returned again by the next read.
    Item.End<M> end = (Item.End<M>) item;
    if (end.status().isOk()) {
      return null;
    }
    PenstockException failure = StatusReader.ofCall(end.status(), end.trailers());
    boolean isOwnCancellation = isStopped || hasAnswer || Context.current().isCancelled();
    throw isOwnCancellation ? failure : failure.cancelledToUnavailable();
  }

  @Override
  public Metadata headers() {
    try {
      return headers.get();
    } catch (InterruptedException interruption) {
      throw PenstockException.interrupted(interruption);
    } catch (ExecutionException failed) {
      throw(PenstockException) failed.getCause();
    }
  }

  @Override
  public void stop() {
    isStopped = true;
    call.cancel("the client closed the stream", null);
  }

  private final class Listener extends ClientCall.Listener<M> {
    @Override
    public void onHeaders(Metadata received) {
      headers.complete(received);
    }

    @Override
    public void onMessage(M message) {
      items.add(new Item.Message<>(message));
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      // A rejected call may have no initial metadata.
      headers.completeExceptionally(StatusReader.ofCall(status, trailers));
      items.add(new Item.End<>(status, trailers));
    }
  }
}
