package penstock.client;

import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * The address of a server.
 *
 * @param target the gRPC target to connect to
 * @param hasManyServers whether calls are distributed over all servers behind the name
 * @param isLocal whether the target is on this machine
 */
record Address(String target, boolean hasManyServers, boolean isLocal) {
  private static final int DEFAULT_PORT = 50051;
  private static final int MAX_PORT = 65535;
  private static final Pattern SCHEME = Pattern.compile("(dns|unix|xds|ipv4|ipv6|passthrough):.*");
  private static final Pattern PLAIN =
      Pattern.compile("(?<host>\\[[0-9A-Fa-f:.%]+]|[^\\s/:\\[\\]]+)(?::(?<port>\\d{1,5}))?");
  private static final Pattern LOOPBACK =
      Pattern.compile("localhost|127\\.\\d{1,3}\\.\\d{1,3}\\.\\d{1,3}|\\[::1]");

  /** Parses HOST, HOST:PORT, [IPV6]:PORT, or a gRPC target, which is used unchanged. */
  static Address parse(String address) {
    if (SCHEME.matcher(address).matches()) {
      return new Address(address, address.startsWith("dns:"), address.startsWith("unix:"));
    }
    Matcher plain = PLAIN.matcher(address);
    if (!plain.matches()) {
      throw new IllegalArgumentException(
          "address: must be HOST, HOST:PORT, [IPV6]:PORT or a gRPC target, not " + address);
    }
    String portText = plain.group("port");
    int port = portText == null ? DEFAULT_PORT : Integer.parseInt(portText);
    if (port < 1 || port > MAX_PORT) {
      throw new IllegalArgumentException("address: the port must be from 1 to 65535, not " + port);
    }
    String host = plain.group("host");
    // With its scheme, because gRPC parses "localhost:50051" as a URI of the scheme "localhost".
    String target = "dns:///" + host + ":" + port;
    return new Address(target, false, LOOPBACK.matcher(host).matches());
  }
}
