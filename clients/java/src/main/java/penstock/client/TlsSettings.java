package penstock.client;

import io.grpc.ChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Objects;

/**
 * The encryption of connections. All files are PEM.
 *
 * @param authorities the accepted certificate authorities; null for those of the system
 * @param certificate the client's certificate chain for mutual TLS, with its key; null for none
 * @param key the private key of the certificate, PKCS 8; null for none
 * @param serverName the name that the server's certificate must have; null for that of the address
 */
public record TlsSettings(Path authorities, Path certificate, Path key, String serverName) {
  /** Accepts the certificate authorities of the system. */
  public static final TlsSettings SYSTEM = new TlsSettings(null, null, null, null);

  /** Rejects a certificate without its key. */
  public TlsSettings {
    if ((certificate == null) != (key == null)) {
      throw new IllegalArgumentException("certificate, key: each requires the other");
    }
  }

  /** Accepts only the certificate authorities of this file. */
  public TlsSettings withAuthorities(Path authorities) {
    Objects.requireNonNull(authorities, "authorities");
    return new TlsSettings(authorities, certificate, key, serverName);
  }

  /** Sends the server a certificate of the client. */
  public TlsSettings withCertificate(Path certificate, Path key) {
    Objects.requireNonNull(certificate, "certificate");
    return new TlsSettings(authorities, certificate, key, serverName);
  }

  /** For certificates with a name other than the host of the address. */
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
