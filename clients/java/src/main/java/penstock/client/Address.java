package penstock.client;

import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * Where a server is.
 *
 * @param target what gRPC is to connect to
 * @param hasManyServers whether calls are dealt to all servers behind the name
 * @param isLocal whether what is sent there stays on this machine
 */
record Address(String target, boolean hasManyServers, boolean isLocal) {
  private static final int DEFAULT_PORT = 50051;
  private static final int MAX_PORT = 65535;
  private static final Pattern SCHEME = Pattern.compile("(dns|unix|xds|ipv4|ipv6|passthrough):.*");
  private static final Pattern PLAIN =
      Pattern.compile("(?<host>\\[[0-9A-Fa-f:.%]+]|[^\\s/:\\[\\]]+)(?::(?<port>\\d{1,5}))?");
  private static final Pattern LOOPBACK =
      Pattern.compile("localhost|127\\.\\d{1,3}\\.\\d{1,3}\\.\\d{1,3}|\\[::1]");

  /** From HOST, HOST:PORT, [IPV6]:PORT, or a gRPC target, which is taken as it is. */
  static Address parse(String address) {
    if (SCHEME.matcher(address).matches()) {
      return new Address(address, address.startsWith("dns:"), address.startsWith("unix:"));
    }
    Matcher plain = PLAIN.matcher(address);
    if (!plain.matches()) {
      throw new IllegalArgumentException(
          "address: must be HOST, HOST:PORT, [IPV6]:PORT or a gRPC target, not " + address);
    }
    String told = plain.group("port");
    int port = told == null ? DEFAULT_PORT : Integer.parseInt(told);
    if (port < 1 || port > MAX_PORT) {
      throw new IllegalArgumentException("address: the port must be from 1 to 65535, not " + port);
    }
    String host = plain.group("host");
    // With its scheme, because gRPC takes "localhost:50051" for a URI of the scheme "localhost".
    String target = "dns:///" + host + ":" + port;
    return new Address(target, false, LOOPBACK.matcher(host).matches());
  }
}
