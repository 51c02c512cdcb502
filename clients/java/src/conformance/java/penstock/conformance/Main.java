package penstock.conformance;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * The conformance program of the Java client: reads names of scenarios and writes the result of
 * each. tests/conformance/README.md of the project defines its interface.
 */
public final class Main {
  private static final int SCENARIO_S = 60;
  private static final Map<String, Scenario> SCENARIOS =
      Map.ofEntries(Map.entry("stream_in_order", Answers::streamInOrder),
          Map.entry("once_equals_stream", Answers::onceEqualsStream),
          Map.entry("token_prompt", Answers::tokenPrompt), Map.entry("chat", Answers::chat),
          Map.entry("utf8_across_chunks", Answers::utf8AcrossChunks),
          Map.entry("large_prompt", Answers::largePrompt),
          Map.entry("invalid_field", Rejections::invalidField),
          Map.entry("unknown_model", Rejections::unknownModel),
          Map.entry("unimplemented_feature", Rejections::unimplementedFeature),
          Map.entry("duplicate_request_id", Rejections::duplicateRequestId),
          Map.entry("cancel_after_first_token", RequestEnds::cancelAfterFirstToken),
          Map.entry("cancel_by_id", RequestEnds::cancelById),
          Map.entry("deadline", RequestEnds::deadline),
          Map.entry("queue_full", Rejections::queueFull), Map.entry("metadata", Answers::metadata),
          Map.entry("multiplex", Multiplexing::multiplex), Map.entry("resume", RequestEnds::resume),
          Map.entry("retry_after_rejection", Rejections::retryAfterRejection),
          Map.entry("engine_killed", RequestEnds::engineKilled),
          Map.entry("drain", RequestEnds::drain));

  private final BufferedReader lines =
      new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
  private final ExecutorService threads = Executors.newCachedThreadPool(work -> {
    Thread thread = new Thread(work);
    thread.setDaemon(true);
    return thread;
  });
  private String address;

  private Main(String address) {
    this.address = address;
  }

  /** Is started with {@code --address HOST:PORT}; ends at the end of stdin. */
  public static void main(String[] arguments) throws Exception {
    if (arguments.length != 2 || !arguments[0].equals("--address")) {
      System.err.println("usage: conformance --address HOST:PORT");
      System.exit(2);
    }
    new Main(arguments[1]).serve();
  }

  private void serve() throws IOException, InterruptedException {
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      String[] words = line.strip().split(" ", 2);
      if (words[0].equals("address") && words.length == 2) {
        address = words[1];
      } else if (!words[0].isEmpty()) {
        Map<String, String> result = outcome(words[0]);
        writeLine(result);
      }
    }
  }

  private Map<String, String> outcome(String name) throws InterruptedException {
    Scenario scenario = SCENARIOS.get(name);
    if (scenario == null) {
      return result(name, "no such scenario");
    }
    ScenarioInput input = new ScenarioInput(address, new ToDriver(name), threads);
    Future<?> running = threads.submit(() -> {
      scenario.run(input);
      return null;
    });
    try {
      running.get(SCENARIO_S, TimeUnit.SECONDS);
      return result(name, "");
    } catch (TimeoutException late) {
      running.cancel(true);
      return result(name, "not done within " + SCENARIO_S + " s");
    } catch (ExecutionException failed) {
      Throwable cause = failed.getCause();
      if (cause instanceof ExpectationFailed) {
        return result(name, cause.getMessage());
      }
      cause.printStackTrace();
      return result(name, cause.toString());
    }
  }

  private static Map<String, String> result(String name, String why) {
    Map<String, String> result = new LinkedHashMap<>();
    result.put("scenario", name);
    result.put("outcome", why.isEmpty() ? "passed" : "failed");
    if (!why.isEmpty()) {
      result.put("why", why);
    }
    return result;
  }

  private static void writeLine(Map<String, String> line) {
    System.out.println(Json.object(line));
    System.out.flush();
  }

  private final class ToDriver implements ScenarioInput.Driver {
    private final String name;

    ToDriver(String name) {
      this.name = name;
    }

    @Override
    public void ready() {
      Map<String, String> event = new LinkedHashMap<>();
      event.put("scenario", name);
      event.put("event", "ready");
      writeLine(event);
    }

    @Override
    public void untilGo() {
      ready();
      try {
        String line = lines.readLine();
        ExpectationFailed.require("go".equals(line), "expected go, not " + line);
      } catch (IOException failed) {
        throw new UncheckedIOException(failed);
      }
    }
  }
}
