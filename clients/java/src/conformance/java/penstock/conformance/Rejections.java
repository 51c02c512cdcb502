package penstock.conformance;

import static penstock.conformance.ExpectationFailed.require;
import static penstock.conformance.ScenarioInput.CALL;
import static penstock.conformance.ScenarioInput.LONG_TOKENS;
import static penstock.conformance.ScenarioInput.greedy;
import static penstock.conformance.ScenarioInput.joined;

import dev.penstock.v1.ErrorReason;
import dev.penstock.v1.GenerateOnceResponse;
import dev.penstock.v1.GenerateRequest;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.ForwardingClientCallListener.SimpleForwardingClientCallListener;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import penstock.client.FieldViolation;
import penstock.client.PenstockClient;
import penstock.client.PenstockException;
import penstock.client.RetryPolicy;

/** Scenarios about rejected requests, and about the details in their statuses. */
final class Rejections {
  private static final int NUM_PLACES = 4;
  private static final int NUM_WAITING = 4;
  private static final int BLOCKING_TOKENS = 300;
  private static final int MAX_TRIES = 100;

  private Rejections() {}

  /** Returns the failure of a request, which must have this code and reason. */
  static PenstockException rejected(
      PenstockClient client, GenerateRequest.Builder request, Status.Code code, String reason) {
    try {
      client.generateOnce(request.build(), CALL);
    } catch (PenstockException failure) {
      boolean isExpected = failure.code() == code && failure.reason().equals(reason);
      require(isExpected, failure + ", not " + code + " (" + reason + ")");
      return failure;
    }
    throw new ExpectationFailed("it was answered, not rejected with " + code);
  }

  static void invalidField(ScenarioInput input) {
    GenerateRequest.Builder request = greedy(4);
    request.getSamplingBuilder().setTemperature(-1);
    try (PenstockClient client = input.client()) {
      PenstockException failure =
          rejected(client, request, Status.Code.INVALID_ARGUMENT, "INVALID_ARGUMENT");
      List<String> fields = failure.fieldViolations().stream().map(FieldViolation::field).toList();
      require(fields.contains("sampling.temperature"), "the fields are " + fields);
    }
  }

  static void unknownModel(ScenarioInput input) {
    GenerateRequest.Builder request = greedy(4).setModel("no-such-model");
    try (PenstockClient client = input.client()) {
      PenstockException failure =
          rejected(client, request, Status.Code.NOT_FOUND, "MODEL_NOT_FOUND");
      String model = failure.metadata().get("model");
      require("no-such-model".equals(model), "ErrorInfo names the model " + model);
    }
  }

  static void unimplementedFeature(ScenarioInput input) {
    GenerateRequest.Builder request = greedy(4);
    request.getConstraintBuilder().getJsonSchemaBuilder().setSchema("{\"type\": \"object\"}");
    try (PenstockClient client = input.client()) {
      PenstockException failure =
          rejected(client, request, Status.Code.UNIMPLEMENTED, "FEATURE_UNSUPPORTED");
      String feature = failure.metadata().get("feature");
      require("json_schema".equals(feature), "ErrorInfo names the feature " + feature);
    }
  }

  static void duplicateRequestId(ScenarioInput input) {
    String id = ScenarioInput.newId();
    try (PenstockClient client = input.client();
         CheckedStream first =
             new CheckedStream(client.generate(greedy(100).setRequestId(id).build(), CALL))) {
      first.untilTokens(1);
      rejected(client, greedy(4).setRequestId(id), Status.Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE");
      first.untilEnd();
      require(first.numTokens() == 100, "the first had " + first.numTokens() + " tokens, not 100");
    }
  }

  static void queueFull(ScenarioInput input) {
    try (PenstockClient client = input.client();
         Blockers blockers = new Blockers(client, LONG_TOKENS)) {
      PenstockException failure =
          rejected(client, greedy(4), Status.Code.RESOURCE_EXHAUSTED, "QUEUE_FULL");
      boolean hasDelay = !failure.retryAfter().isZero();
      require(hasDelay, "RetryInfo has no delay behind " + blockers.num() + " others");
    }
  }

  static void retryAfterRejection(ScenarioInput input) throws Exception {
    FirstEnd firstEnd = new FirstEnd();
    RetryPolicy retry = RetryPolicy.STANDARD.withMaxAttempts(10);
    try (PenstockClient client = input.client();
         PenstockClient retrying =
             PenstockClient.builder(input.address()).retry(retry).intercept(firstEnd).build()) {
      Future<GenerateOnceResponse> late;
      try (Blockers blockers = new Blockers(client, BLOCKING_TOKENS)) {
        late = input.concurrently(() -> retrying.generateOnce(greedy(8).build(), CALL));
        Status first = firstEnd.status.get();
        boolean isRejected = first.getCode() == Status.Code.RESOURCE_EXHAUSTED;
        require(isRejected, "behind " + blockers.num() + " others the first attempt: " + first);
      }
      int numTokens = joined(late).getFinished().getUsage().getNumCompletionTokens();
      require(numTokens == 8, numTokens + " tokens, not 8");
    }
  }

  /** Receives the end of the first call of a client. */
  private static final class FirstEnd implements ClientInterceptor {
    private final CompletableFuture<Status> status = new CompletableFuture<>();

    @Override
    public <R, M> ClientCall<R, M> interceptCall(
        MethodDescriptor<R, M> method, CallOptions options, Channel next) {
      return new SimpleForwardingClientCall<>(next.newCall(method, options)) {
        @Override
        public void start(Listener<M> listener, Metadata headers) {
          super.start(new Ear<>(listener), headers);
        }
      };
    }

    private final class Ear<M> extends SimpleForwardingClientCallListener<M> {
      Ear(ClientCall.Listener<M> listener) {
        super(listener);
      }

      @Override
      public void onClose(Status ended, Metadata trailers) {
        status.complete(ended);
        super.onClose(ended, trailers);
      }
    }
  }

  /** Requests that occupy the whole service until they are closed. */
  private static final class Blockers implements AutoCloseable {
    private final List<CheckedStream> all = new ArrayList<>();

    Blockers(PenstockClient client, int numTokens) {
      try {
        for (int each = 0; each < NUM_PLACES + NUM_WAITING; each++) {
          // Submitted one by one, because the queue holds four requests and is processed once per
          // step.
          CheckedStream checked = admitted(client, greedy(numTokens).build());
          all.add(checked);
          if (each < NUM_PLACES) {
            checked.untilTokens(1);
          }
        }
      } catch (RuntimeException failure) {
        close();
        throw failure;
      }
    }

    /** There is a free place, but the queue state that a server process has may be one step old. */
    private static CheckedStream admitted(PenstockClient client, GenerateRequest request) {
      for (int tries = 1; true; tries++) {
        CheckedStream checked = new CheckedStream(client.generate(request, CALL));
        try {
          checked.untilAccepted();
          return checked;
        } catch (PenstockException failure) {
          boolean isFull = failure.hasReason(ErrorReason.ERROR_REASON_QUEUE_FULL);
          if (!isFull || tries == MAX_TRIES) {
            throw failure;
          }
        }
      }
    }

    int num() {
      return all.size();
    }

    @Override
    public void close() {
      all.forEach(CheckedStream::close);
    }
  }
}
