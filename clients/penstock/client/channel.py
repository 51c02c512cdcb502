"""How a connection is opened: the target an address means, and channel options.

Owns what both clients share of that. Does not open anything.
"""

import ipaddress
import re
from dataclasses import dataclass

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
"""Where `penstock serve` listens unless told otherwise."""

_TARGET_SCHEMES = ("dns", "unix", "unix-abstract", "vsock", "ipv4", "ipv6", "xds", "google-c2p")
_HOST_AND_PORT = re.compile(
    r"(?P<host>\[(?P<ipv6>[^\[\]]*)\]|[^\s:/\[\]]+)(?P<colon>:(?P<port>[0-9]*))?"
)

MIN_KEEPALIVE_S = 20.0
"""Servers disconnect clients that ping much more often than this."""


def grpc_target(address: str) -> str:
    """What gRPC is to connect to: HOST:PORT with port 50051 for a host alone.

    Left alone, gRPC takes 443 for a missing port. Its own targets, such as `unix:PATH` and
    `dns:///HOST:PORT`, pass as they are. Raises ValueError for what is neither.
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
        return f"{parts['host']}:{DEFAULT_PORT}"
    if not parts["port"]:
        raise ValueError(f"address: there is no port after the colon of {address!r}")
    if not 1 <= int(parts["port"]) <= 65535:
        raise ValueError(f"address: the port must be from 1 to 65535, not {parts['port']}")
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """Connection settings.

    `keepalive_s`: seconds between pings while calls are open, at least 20; a ping that is not
    answered within `keepalive_timeout_s` ends the connection. `max_message_bytes` bounds messages
    either way. `max_reconnect_backoff_s` bounds the wait between attempts to connect.
    """

    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 32 << 20
    max_reconnect_backoff_s: float = 5.0

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

    def options(self) -> tuple[tuple[str, int], ...]:
        """gRPC channel arguments."""
        backoff_ms = max(1, round(self.max_reconnect_backoff_s * 1e3))
        return (
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            # gRPC waits a second before it tries to connect again; a server that restarts, or is
            # just starting, should be found sooner.
            ("grpc.initial_reconnect_backoff_ms", min(200, backoff_ms)),
            ("grpc.max_reconnect_backoff_ms", backoff_ms),
        )
