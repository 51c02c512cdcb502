package penstock.client;

import com.google.common.util.concurrent.ListenableFuture;
import com.google.protobuf.Message;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptors;
import io.grpc.Context;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import dev.penstock.v1.CancelRequest;
import dev.penstock.v1.CancelResponse;
import dev.penstock.v1.DetokenizeRequest;
import dev.penstock.v1.GenerateOnceRequest;
import dev.penstock.v1.GenerateOnceResponse;
import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerationServiceGrpc;
import dev.penstock.v1.GetModelRequest;
import dev.penstock.v1.ListModelsRequest;
import dev.penstock.v1.ListModelsResponse;
import dev.penstock.v1.ModelInfo;
import dev.penstock.v1.ModelServiceGrpc;
import dev.penstock.v1.RequestState;
import dev.penstock.v1.ResumeRequest;
import dev.penstock.v1.ResumeResponse;
import dev.penstock.v1.TokenizeRequest;
import dev.penstock.v1.TokenizeResponse;

/**
 * Makes calls to one address of Penstock, a gRPC service that streams the output of language
 * models. Threads may share one client. Close it when it is no longer needed.
 *
 * <p>Calls block. Interrupting the thread ends its calls; so does the end of {@link
 * Context#current()}. Requests and responses are the messages of package {@code dev.penstock.v1}. Every
 * failure of a call is a {@link PenstockException}. A request with an unpaired surrogate is not
 * sent; it causes an {@link IllegalArgumentException} that names the field.
 */
public final class PenstockClient implements AutoCloseable {
  private static final Duration LEAVING_DEADLINE = Duration.ofSeconds(2);

  private final ConnectionPool connections;
  private final RetryPolicy retry;
  private final RetryBudget budget = new RetryBudget();
  // The Cancel calls for requests that would continue after their streams.
  private final Set<ListenableFuture<CancelResponse>> leaving = ConcurrentHashMap.newKeySet();
  private volatile boolean isClosing;
  private volatile boolean isClosed;

  PenstockClient(ConnectionPool connections, RetryPolicy retry) {
    this.connections = connections;
    this.retry = retry;
  }

  /** Creates a client with the default settings, without TLS; see {@link #builder}. */
  public static PenstockClient connect(String address) {
    return builder(address).build();
  }

  /**
   * Returns a builder of clients for an address: HOST, HOST:PORT (the default port is 50051),
   * [IPV6]:PORT, or a gRPC target such as {@code dns:///HOST:PORT}, which distributes calls over
   * all servers behind the name.
   */
  public static ClientBuilder builder(String address) {
    return new ClientBuilder(address);
  }

  /** Like {@link #generate(GenerateRequest, CallSettings)}, without settings. */
  public GenerationStream generate(GenerateRequest request) {
    return generate(request, CallSettings.NONE);
  }

  /**
   * Streams the response to a request. Reading the stream reports failures. If the request has a
   * resume_timeout, the stream reconnects by itself after a lost connection.
   */
  public GenerationStream generate(GenerateRequest request, CallSettings settings) {
    Unicode.require(request);
    CallTerms terms = CallTerms.begin(settings);
    return new GenerationStream(this, terms, request, () -> openGenerate(request, terms));
  }

  /** Like {@link #generateOnce(GenerateRequest, CallSettings)}, without settings. */
  public GenerateOnceResponse generateOnce(GenerateRequest request) {
    return generateOnce(request, CallSettings.NONE);
  }

  /**
   * Returns the complete result of a request. Set a deadline, because nothing is returned before
   * the end.
   */
  public GenerateOnceResponse generateOnce(GenerateRequest request, CallSettings settings) {
    Unicode.require(request);  // Checked here, so that the paths are those that the server reports.
    GenerateOnceRequest whole = GenerateOnceRequest.newBuilder().setGeneration(request).build();
    return call(GenerationServiceGrpc.getGenerateOnceMethod(), whole, settings);
  }

  /** Like {@link #resume(ResumePoint, CallSettings)}, without settings. */
  public GenerationStream resume(ResumePoint point) {
    return resume(point, CallSettings.NONE);
  }

  /**
   * Continues the stream of a request with a resume_timeout after its connection, the server
   * process or the client was lost. The stream of an earlier reader ends.
   */
  public GenerationStream resume(ResumePoint point, CallSettings settings) {
    return new GenerationStream(this, CallTerms.begin(settings), point);
  }

  /**
   * Sends many requests over one call. Its calls send the metadata and the trace of the settings.
   */
  public Multiplex multiplex(MultiplexSettings multiplex, CallSettings settings) {
    return new Multiplex(this, multiplex, settings);
  }

  /** Like {@link #cancel(String, CallSettings)}, without settings. */
  public RequestState cancel(String requestId) {
    return cancel(requestId, CallSettings.NONE);
  }

  /**
   * Ends a request of the caller's tenant by its id, regardless of the client that submitted it.
   * Returns the state of the request before the cancellation.
   */
  public RequestState cancel(String requestId, CallSettings settings) {
    CancelRequest request = CancelRequest.newBuilder().setRequestId(requestId).build();
    return call(GenerationServiceGrpc.getCancelMethod(), request, settings).getState();
  }

  /** Returns the models that the caller may use, sorted by name. */
  public List<ModelInfo> listModels(CallSettings settings) {
    List<ModelInfo> models = new ArrayList<>();
    String token = "";
    do {
      ListModelsRequest request = ListModelsRequest.newBuilder().setPageToken(token).build();
      ListModelsResponse page = call(ModelServiceGrpc.getListModelsMethod(), request, settings);
      models.addAll(page.getModelsList());
      token = page.getNextPageToken();
    } while (!token.isEmpty());
    return List.copyOf(models);
  }

  /**
   * Returns the features and limits of a model; an empty name means the default model of the
   * server.
   */
  public ModelInfo getModel(String name, CallSettings settings) {
    GetModelRequest.Builder request = GetModelRequest.newBuilder();
    if (!name.isEmpty()) {
      request.setName(name);
    }
    return call(ModelServiceGrpc.getGetModelMethod(), request.build(), settings).getModel();
  }

  /** Converts text or a conversation to token ids. */
  public TokenizeResponse tokenize(TokenizeRequest request, CallSettings settings) {
    return call(ModelServiceGrpc.getTokenizeMethod(), request, settings);
  }

  /** Converts token ids to text. */
  public String detokenize(DetokenizeRequest request, CallSettings settings) {
    return call(ModelServiceGrpc.getDetokenizeMethod(), request, settings).getText();
  }

  /**
   * Returns a channel for generated stubs of other services. It sends the token; failures are
   * gRPC's StatusRuntimeException.
   */
  public Channel channel() {
    return connections;
  }

  /**
   * Closes the connections. Open streams end with CANCELLED. Requests with a resume_timeout
   * continue, and another client can resume them. Waits for at most 2 s until requests whose
   * streams were closed before are cancelled.
   */
  @Override
  public void close() {
    isClosing = true;
    long end = System.nanoTime() + LEAVING_DEADLINE.toNanos();
    try {
      for (ListenableFuture<CancelResponse> each : leaving) {
        each.get(end - System.nanoTime(), TimeUnit.NANOSECONDS);
      }
    } catch (InterruptedException interruption) {
      Thread.currentThread().interrupt();
    } catch (ExecutionException | TimeoutException failed) {
      // Requests that were not cancelled end after their resume_timeout.
    } finally {
      isClosed = true;
      connections.close();
    }
  }

  boolean isClosed() {
    return isClosed;
  }

  Attempts newAttempts() {
    return new Attempts(retry, budget);
  }

  /**
   * Called before another attempt, because gRPC would wait a second and longer before it
   * reconnects.
   */
  void reconnect() {
    connections.reconnect();
  }

  /** Makes one attempt at Resume. */
  Source openResume(ResumePoint point, CallTerms terms) {
    ResumeRequest request = ResumeRequest.newBuilder()
                                .setRequestId(point.requestId())
                                .setNextSequence(point.nextSequence())
                                .addAllReceivedTokenCounts(point.receivedTokenCounts())
                                .build();
    Unicode.require(request);
    return CallSource.open(connections, GenerationServiceGrpc.getResumeMethod(), terms, request,
        ResumeResponse::getResponse);
  }

  private Source openGenerate(GenerateRequest request, CallTerms terms) {
    return CallSource.open(
        connections, GenerationServiceGrpc.getGenerateMethod(), terms, request, each -> each);
  }

  /** Cancels a request that would continue after its stream. Only close waits for the call. */
  void leave(String requestId, CallTerms terms) {
    if (isClosing) {
      return;
    }
    CallSettings settings = CallSettings.NONE.withDeadline(LEAVING_DEADLINE);
    settings = settings.withMetadata(terms.settings().metadata());
    CallTerms own = new CallTerms(CallTerms.begin(settings).deadline(), settings);
    CancelRequest request = CancelRequest.newBuilder().setRequestId(requestId).build();
    // The cause that ended the stream must not end this call.
    Context.ROOT.run(() -> {
      ListenableFuture<CancelResponse> answer = ClientCalls.futureUnaryCall(
          newCall(GenerationServiceGrpc.getCancelMethod(), own), request);
      leaving.add(answer);
      answer.addListener(() -> leaving.remove(answer), Runnable::run);
    });
  }

  /** Makes a call with one response, with as many attempts as the policy allows. */
  private <R extends Message, M> M call(
      MethodDescriptor<R, M> method, R request, CallSettings settings) {
    Unicode.require(request);
    CallTerms terms = CallTerms.begin(settings);
    Attempts attempts = newAttempts();
    while (true) {
      PenstockException failure;
      try {
        return ClientCalls.blockingUnaryCall(withHeaders(terms), method, terms.options(), request);
      } catch (StatusRuntimeException failed) {
        failure = explain(failed);
      }
      Optional<Duration> delay = isClosed ? Optional.empty() : attempts.delayAfter(failure, terms);
      if (delay.isEmpty()) {
        throw failure;
      }
      try {
        TimeUnit.NANOSECONDS.sleep(CallTerms.saturatedNanos(delay.get()));
      } catch (InterruptedException interruption) {
        throw PenstockException.interrupted(interruption);
      }
      reconnect();
    }
  }

  private PenstockException explain(StatusRuntimeException failed) {
    PenstockException failure = StatusReader.ofCall(failed.getStatus(), failed.getTrailers());
    if (isClosed && failure.reason().isEmpty()) {
      return PenstockException.clientClosed();
    }
    boolean isOwnCancellation =
        Thread.currentThread().isInterrupted() || Context.current().isCancelled();
    return isOwnCancellation ? failure : failure.cancelledToUnavailable();
  }

  private <R, M> ClientCall<R, M> newCall(MethodDescriptor<R, M> method, CallTerms terms) {
    return withHeaders(terms).newCall(method, terms.options());
  }

  private Channel withHeaders(CallTerms terms) {
    return ClientInterceptors.intercept(
        connections, MetadataUtils.newAttachHeadersInterceptor(terms.headers()));
  }
}
