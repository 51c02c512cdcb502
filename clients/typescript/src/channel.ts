/** The gRPC target of an address, and channel options. Opens no connection. */

import { isIPv6 } from "node:net";
import type { ChannelOptions } from "@grpc/grpc-js";

const DEFAULT_PORT = 50051;
const MIN_KEEPALIVE_MS = 20_000;
const TARGET = /^(dns|unix|ipv4|ipv6|xds):/;
const HOST_AND_PORT = /^(\[(?<ipv6>[^[\]]*)\]|[^\s:/[\]]+)(?<colon>:(?<port>\d*))?$/;
const ROUND_ROBIN = JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] });

/** Settings of a connection. */
export interface ChannelSettings {
  /**
   * Time between pings while calls are open. At least 20 s, because servers disconnect clients that
   * ping more often. Default 30 s.
   */
  readonly keepaliveMs?: number;
  /** The connection ends if a ping is not acknowledged within this time. Default 10 s. */
  readonly keepaliveTimeoutMs?: number;
  /** Maximum size of a message, in both directions. Default 32 MiB. */
  readonly maxMessageBytes?: number;
  /** Maximum wait between connection attempts. Default 5 s. */
  readonly maxReconnectBackoffMs?: number;
  /** The name that the server's certificate must have, if it is not the host of the address. */
  readonly serverName?: string;
}

/**
 * Returns the gRPC target of an address: HOST, HOST:PORT, [IPV6]:PORT, or a gRPC target
 * (`unix:PATH`, `dns:///HOST:PORT`, `ipv4:A,B`), which is used unchanged. Throws TypeError for
 * other texts.
 */
export function grpcTarget(address: string): string {
  if (TARGET.test(address)) return address;
  const parts = HOST_AND_PORT.exec(address)?.groups;
  if (!parts || (parts["ipv6"] !== undefined && !isIPv6(parts["ipv6"]))) {
    throw new TypeError(
      `address: must be HOST, HOST:PORT, [IPV6]:PORT or a gRPC target, not ${JSON.stringify(address)}`,
    );
  }
  if (parts["colon"] === undefined) return `${address}:${DEFAULT_PORT}`;
  const port = Number(parts["port"]);
  if (!(port >= 1 && port <= 65535)) {
    throw new TypeError(`address: the port of ${JSON.stringify(address)} is not from 1 to 65535`);
  }
  return address;
}

/** Returns gRPC channel options. Throws RangeError, which names the field that is out of range. */
export function channelOptions(target: string, settings: ChannelSettings): ChannelOptions {
  const {
    keepaliveMs = 30_000,
    keepaliveTimeoutMs = 10_000,
    maxMessageBytes = 32 << 20,
    maxReconnectBackoffMs = 5000,
    serverName,
  } = settings;
  if (!(keepaliveMs >= MIN_KEEPALIVE_MS)) {
    throw new RangeError(`keepaliveMs: must be at least ${MIN_KEEPALIVE_MS}, not ${keepaliveMs}`);
  }
  for (const [name, value] of Object.entries({
    keepaliveTimeoutMs,
    maxMessageBytes,
    maxReconnectBackoffMs,
  })) {
    if (!(value > 0)) throw new RangeError(`${name}: must be positive, not ${value}`);
  }
  return {
    "grpc.keepalive_time_ms": keepaliveMs,
    "grpc.keepalive_timeout_ms": keepaliveTimeoutMs,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.max_receive_message_length": maxMessageBytes,
    "grpc.max_send_message_length": maxMessageBytes,
    // gRPC waits a second before it reconnects. With a shorter wait, a restarted server is found
    // sooner.
    "grpc.initial_reconnect_backoff_ms": Math.min(200, maxReconnectBackoffMs),
    "grpc.max_reconnect_backoff_ms": maxReconnectBackoffMs,
    // Clients of one target would otherwise share one connection.
    "grpc.use_local_subchannel_pool": 1,
    ...(TARGET.test(target) && !target.startsWith("unix:")
      ? { "grpc.service_config": ROUND_ROBIN }
      : {}),
    ...(serverName ? { "grpc.ssl_target_name_override": serverName } : {}),
  };
}
