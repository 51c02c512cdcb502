package penstock.client;

import io.grpc.ChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Objects;

/**
 * How connections are encrypted; all files are PEM.
 *
 * @param authorities the authorities that are accepted; null for the system's
 * @param certificate the client's own chain where TLS is mutual, with its key; null for none
 * @param key the private key of the certificate, PKCS 8; null for none
 * @param serverName the name that the server's certificate has to be for; null for the address's
 */
public record TlsSettings(Path authorities, Path certificate, Path key, String serverName) {
  /** Accepts the system's authorities. */
  public static final TlsSettings SYSTEM = new TlsSettings(null, null, null, null);

  /** Refuses a certificate without its key. */
  public TlsSettings {
    if ((certificate == null) != (key == null)) {
      throw new IllegalArgumentException("certificate, key: one means nothing without the other");
    }
  }

  /** Accepts the authorities of this file, and no others. */
  public TlsSettings withAuthorities(Path authorities) {
    Objects.requireNonNull(authorities, "authorities");
    return new TlsSettings(authorities, certificate, key, serverName);
  }

  /** Shows the server a certificate of the client's own. */
  public TlsSettings withCertificate(Path certificate, Path key) {
    Objects.requireNonNull(certificate, "certificate");
    return new TlsSettings(authorities, certificate, key, serverName);
  }

  /** For certificates that name another host than the address does. */
  public TlsSettings withServerName(String serverName) {
    Objects.requireNonNull(serverName, "serverName");
    return new TlsSettings(authorities, certificate, key, serverName);
  }

  /** Reads the files. */
  ChannelCredentials credentials() {
    TlsChannelCredentials.Builder credentials = TlsChannelCredentials.newBuilder();
    try {
      if (authorities != null) {
        credentials.trustManager(authorities.toFile());
      }
      if (certificate != null) {
        credentials.keyManager(certificate.toFile(), key.toFile());
      }
    } catch (IOException unreadable) {
      throw new IllegalArgumentException("tls: " + unreadable.getMessage(), unreadable);
    }
    return credentials.build();
  }
}
