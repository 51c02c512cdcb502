"""The gRPC target of an address, and channel options.

Shared by both clients. Opens no connection.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.client.service_config import default_service_config

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
"""The default port of `penstock serve`."""
DEFAULT_OPERATIONS_PORT = DEFAULT_PORT + 1
DEFAULT_OPERATIONS_ADDRESS = f"127.0.0.1:{DEFAULT_OPERATIONS_PORT}"
"""The default operations port of `penstock serve`."""

_TARGET_SCHEMES = ("dns", "unix", "unix-abstract", "vsock", "ipv4", "ipv6", "xds", "google-c2p")
_COMMA_SCHEMES = ("ipv4:", "ipv6:", "unix:", "unix-abstract:")
_HOST_AND_PORT = re.compile(
    r"(?P<host>\[(?P<ipv6>[^\[\]]*)\]|[^\s:/\[\]]+)(?P<colon>:(?P<port>[0-9]*))?"
)

MIN_KEEPALIVE_S = 20.0
"""Servers disconnect clients that ping much more often than this."""


def grpc_target(address: str, default_port: int = DEFAULT_PORT) -> str:
    """Return the gRPC target of an address: HOST:PORT, with `default_port` for a host alone.

    gRPC's own default port is 443. gRPC's targets, such as `unix:PATH` and `dns:///HOST:PORT`, are
    returned unchanged. Raises ValueError for anything else.
    """
    if address.partition(":")[0] in _TARGET_SCHEMES and ":" in address:
        return address
    parts = _HOST_AND_PORT.fullmatch(address)
    if parts is None:
        raise ValueError(
            f"address: must be HOST, HOST:PORT, [IPV6]:PORT or a gRPC target, not {address!r}"
        )
    if parts["ipv6"] is not None:
        try:
            ipaddress.IPv6Address(parts["ipv6"])
        except ValueError as error:
            raise ValueError(f"address: not an IPv6 address: {error}") from None
    if parts["colon"] is None:
        return f"{parts['host']}:{default_port}"
    if not parts["port"]:
        raise ValueError(f"address: there is no port after the colon of {address!r}")
    if not 1 <= int(parts["port"]) <= 65535:
        raise ValueError(f"address: the port must be from 1 to 65535, not {parts['port']}")
    return address


def grpc_targets(address: str | Sequence[str]) -> tuple[str, ...]:
    """Return the targets of one address, or of several in a sequence or separated by commas.

    A string that begins as an `ipv4:`, `ipv6:` or `unix:` target is one target with its commas.
    Raises ValueError for no address, for a repeated one, and as `grpc_target`.
    """
    if isinstance(address, str):
        is_whole = address.startswith(_COMMA_SCHEMES)
        addresses = (address,) if is_whole else tuple(address.split(","))
    else:
        addresses = tuple(address)
    targets = tuple(grpc_target(part.strip()) for part in addresses)
    if not targets:
        raise ValueError("address: there is none")
    for target in targets:
        if targets.count(target) > 1:
            raise ValueError(f"address: {target} is named twice; use PoolConfig.num_channels")
    return targets


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """How connections are made. Raises ValueError, which names the field, for a value out of range.

    Attributes:
        keepalive_s: Seconds between pings while calls are open, at least 20.
        keepalive_timeout_s: A ping without an answer for this long ends the connection.
        max_message_bytes: Largest message, either way.
        max_reconnect_backoff_s: Longest wait between connection attempts.
        idle_timeout_s: The connection is dropped after this long without a call; the next call
            makes another one.
        service_config: gRPC's service config as JSON. Default: round robin for targets of several
            servers. One with a `retryPolicy` requires `retry=NO_RETRY`.
        server_name: The name that the server's certificate must have, if not the address's host.
    """

    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 32 << 20
    max_reconnect_backoff_s: float = 5.0
    idle_timeout_s: float = 1800.0
    service_config: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if not self.keepalive_s >= MIN_KEEPALIVE_S:
            raise ValueError(f"keepalive_s: must be at least {MIN_KEEPALIVE_S}")
        if not self.keepalive_timeout_s > 0:
            raise ValueError("keepalive_timeout_s: must be positive")
        if self.max_message_bytes < 1:
            raise ValueError("max_message_bytes: must be positive")
        if not self.max_reconnect_backoff_s > 0:
            raise ValueError("max_reconnect_backoff_s: must be positive")
        if not self.idle_timeout_s >= 1:
            raise ValueError("idle_timeout_s: must be at least 1")

    def options(self, target: str = "") -> tuple[tuple[str, int | str], ...]:
        """Return the gRPC channel arguments for a connection to `target`."""
        service_config = self.service_config or default_service_config(target)
        spread = (("grpc.service_config", service_config),) if service_config else ()
        name = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
        backoff_ms = max(1, round(self.max_reconnect_backoff_s * 1e3))
        return (
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            # gRPC waits a second before it reconnects; a server that restarts, or is
            # just starting, should be found sooner.
            ("grpc.initial_reconnect_backoff_ms", min(200, backoff_ms)),
            ("grpc.max_reconnect_backoff_ms", backoff_ms),
            ("grpc.client_idle_timeout_ms", round(self.idle_timeout_s * 1e3)),
            # Channels to one target would otherwise share one connection.
            ("grpc.use_local_subchannel_pool", 1),
            *spread,
            *name,
        )
