package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.penstock.v1.GenerateRequest;
import dev.penstock.v1.GenerateResponse;
import dev.penstock.v1.GenerationServiceGrpc;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerCredentials;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.TlsServerCredentials;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.time.Duration;
import java.util.Base64;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** Addresses, TLS and tokens; over a socket where needed. */
@Timeout(60)
class ConnectionTest {
  private static final char[] PASSWORD = "changeit".toCharArray();
  private static final GenerateRequest REQUEST = FakeServer.request(Duration.ZERO);

  @TempDir Path folder;

  private static final class Service extends GenerationServiceGrpc.GenerationServiceImplBase {
    @Override
    public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
      FakeServer.answer(observer, 1);
    }
  }

  private static final class Ear implements ServerInterceptor {
    private final CompletableFuture<Metadata> received = new CompletableFuture<>();

    @Override
    public <R, M> ServerCall.Listener<R> interceptCall(
        ServerCall<R, M> call, Metadata headers, ServerCallHandler<R, M> next) {
      received.complete(headers);
      return next.startCall(call, headers);
    }

    String header(String name) throws Exception {
      return received.get().get(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER));
    }
  }

  /** A self-signed certificate for 127.0.0.1 and its key, created by the JDK's keytool. */
  private void makeCertificate() throws Exception {
    Path store = folder.resolve("store.p12");
    Process keytool =
        new ProcessBuilder(Path.of(System.getProperty("java.home"), "bin", "keytool").toString(),
            "-genkeypair", "-keyalg", "EC", "-dname", "CN=penstock", "-ext", "san=ip:127.0.0.1",
            "-storetype", "PKCS12", "-storepass", new String(PASSWORD), "-keystore",
            store.toString(), "-alias", "own")
            .inheritIO()
            .start();
    assertEquals(0, keytool.waitFor());
    KeyStore keys = KeyStore.getInstance("PKCS12");
    try (InputStream file = Files.newInputStream(store)) {
      keys.load(file, PASSWORD);
    }
    writePem("cert.pem", "CERTIFICATE", keys.getCertificate("own").getEncoded());
    writePem("key.pem", "PRIVATE KEY", keys.getKey("own", PASSWORD).getEncoded());
  }

  private void writePem(String name, String kind, byte[] content) throws IOException {
    String text = Base64.getMimeEncoder().encodeToString(content);
    String pem = "-----BEGIN " + kind + "-----\n" + text + "\n-----END " + kind + "-----\n";
    Files.writeString(folder.resolve(name), pem);
  }

  private static Server started(ServerCredentials credentials, Ear ear) throws IOException {
    return Grpc.newServerBuilderForPort(0, credentials)
        .addService(new Service())
        .intercept(ear)
        .build()
        .start();
  }

  @Test
  void overTlsWithATokenAndATrace() throws Exception {
    makeCertificate();
    Path certificate = folder.resolve("cert.pem");
    Ear ear = new Ear();
    Path key = folder.resolve("key.pem");
    Server server = started(TlsServerCredentials.create(certificate.toFile(), key.toFile()), ear);
    TraceContext trace = TraceContext.begin();
    try (PenstockClient client = PenstockClient.builder("127.0.0.1:" + server.getPort())
                                     .tls(TlsSettings.SYSTEM.withAuthorities(certificate))
                                     .token(() -> "secret")
                                     .build();
         GenerationStream stream = client.generate(REQUEST, CallSettings.NONE.withTrace(trace))) {
      assertEquals("t1 ", stream.text().collect(Collectors.joining()));
      assertEquals("Bearer secret", ear.header("authorization"));
      assertEquals(trace.traceparent(), ear.header("traceparent"));
    } finally {
      server.shutdownNow();
    }
  }

  @Test
  void aTokenThatCannotBeSentIsNotQuoted() throws Exception {
    Server server = started(InsecureServerCredentials.create(), new Ear());
    try (PenstockClient client =
             PenstockClient.builder("127.0.0.1:" + server.getPort()).token("se cret").build();
         GenerationStream stream = client.generate(REQUEST)) {
      PenstockException failure = assertThrows(PenstockException.class, stream::hasNext);
      assertEquals(Status.Code.UNAUTHENTICATED, failure.code());
      assertFalse(failure.toString().contains("cret"));
    } finally {
      server.shutdownNow();
    }
  }

  @Test
  void noTokenCrossesTheNetworkInPlainText() {
    ClientBuilder builder = PenstockClient.builder("penstock.example:50051").token("secret");
    assertThrows(IllegalArgumentException.class, builder::build);
  }

  @Test
  void aMissingFileIsNamed() {
    TlsSettings tls = TlsSettings.SYSTEM.withAuthorities(folder.resolve("absent.pem"));
    ClientBuilder builder = PenstockClient.builder("127.0.0.1").tls(tls);
    String message = assertThrows(IllegalArgumentException.class, builder::build).getMessage();
    assertTrue(message.contains("absent.pem"), message);
  }

  @Test
  void addresses() {
    assertEquals("dns:///here:50051", Address.parse("here").target());
    assertEquals("dns:///[::1]:7", Address.parse("[::1]:7").target());
    assertTrue(Address.parse("localhost:1").isLocal());
    assertTrue(Address.parse("[::1]").isLocal());
    assertFalse(Address.parse("127.evil.example:1").isLocal());
    assertFalse(Address.parse("10.0.0.1:1").isLocal());
    assertTrue(Address.parse("dns:///service:1").hasManyServers());
    for (String wrong : new String[] {"", "here:", "here:0", "here:65536", "a b", "::1", "h:x"}) {
      assertThrows(IllegalArgumentException.class, () -> Address.parse(wrong), wrong);
    }
  }
}
