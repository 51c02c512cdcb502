"""Converts addresses to gRPC targets, and defines the settings of connections.

Shared by the asynchronous and the blocking client. Opens no connection.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from penstock.client.argument_types import require_number, require_type
from penstock.client.service_config import default_service_config
from penstock.conventions import DEFAULT_HOST, DEFAULT_PORT, MAX_PORT, OPERATIONS_OFFSET

DEFAULT_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
"""The address and port on which `penstock serve` listens by default."""
DEFAULT_OPERATIONS_PORT = DEFAULT_PORT + OPERATIONS_OFFSET
DEFAULT_OPERATIONS_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_OPERATIONS_PORT}"
"""The address and port of the operations service of `penstock serve`, by default."""

_TARGET_SCHEMES = ("dns", "unix", "unix-abstract", "vsock", "ipv4", "ipv6", "xds", "google-c2p")
_COMMA_SCHEMES = ("ipv4:", "ipv6:", "unix:", "unix-abstract:")
_HOST_AND_PORT = re.compile(
    r"(?P<host>\[(?P<ipv6>[^\[\]]*)\]|[^\s:/\[\]]+)(?P<colon>:(?P<port>[0-9]*))?"
)

MIN_KEEPALIVE_S = 20.0
"""Minimum of `keepalive_s`. Servers disconnect clients that ping much more often."""
_MAX_GRPC_INT = 2**31 - 1
"""Maximum value of a channel argument of gRPC, here in bytes or milliseconds."""


def grpc_target(address: str, default_port: int = DEFAULT_PORT) -> str:
    """Return the gRPC target of an address: HOST:PORT, with `default_port` for a host without a
    port.

    The default port of gRPC itself is 443. gRPC targets, such as `unix:PATH` and
    `dns:///HOST:PORT`, are returned unchanged. Raises ValueError for an invalid address, and
    TypeError if it is not a str.
    """
    require_type(address, "address", str)
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
    if not 1 <= int(parts["port"]) <= MAX_PORT:
        raise ValueError(f"address: the port must be from 1 to {MAX_PORT}, not {parts['port']}")
    return address


def grpc_targets(address: str | Sequence[str]) -> tuple[str, ...]:
    """Return the targets of one address, or of several in a sequence or separated by commas.

    A string that begins with `ipv4:`, `ipv6:`, `unix:` or `unix-abstract:` is one target, including
    its commas. Raises ValueError if there is no address, if one is invalid or is repeated, and
    TypeError if one is not a str.
    """
    if isinstance(address, str):
        is_one_target = address.startswith(_COMMA_SCHEMES)
        addresses = (address,) if is_one_target else tuple(address.split(","))
    else:
        require_type(address, "address", str, Sequence)
        addresses = tuple(address)
    for index, part in enumerate(addresses):
        require_type(part, f"address[{index}]", str)
    targets = tuple(grpc_target(part.strip()) for part in addresses)
    if not targets:
        raise ValueError("address: must not be empty")
    for target in targets:
        if targets.count(target) > 1:
            raise ValueError(f"address: {target} is named twice; use PoolConfig.num_channels")
    return targets


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """Settings of the connections. Raises ValueError or TypeError, naming the field, if one is
    invalid.

    Attributes:
        keepalive_s: Seconds between pings while calls are open, at least 20.
        keepalive_timeout_s: The connection ends if a ping is not acknowledged within this time.
        max_message_bytes: Maximum size of a message, in both directions.
        max_reconnect_backoff_s: Maximum wait between connection attempts.
        idle_timeout_s: The connection is closed after this time without a call, at least 1. The
            next call opens another connection.
        service_config: gRPC's service config as JSON. Default: round robin for `dns:`, `ipv4:` and
            `ipv6:` targets, which may name several servers. A config with a retry or hedging policy
            requires `retry=NO_RETRY`.
        server_name: The name that the server's certificate must have, if it is not the host of the
            address.
    """

    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 32 << 20
    max_reconnect_backoff_s: float = 5.0
    idle_timeout_s: float = 1800.0
    service_config: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError, naming the field, if one is invalid."""
        longest_s = _MAX_GRPC_INT / 1e3
        require_number(
            self.keepalive_s, "keepalive_s", Real, at_least=MIN_KEEPALIVE_S, at_most=longest_s
        )
        for name in ("keepalive_timeout_s", "max_reconnect_backoff_s"):
            require_number(getattr(self, name), name, Real, above=0, at_most=longest_s)
        require_number(self.idle_timeout_s, "idle_timeout_s", Real, at_least=1, at_most=longest_s)
        require_number(
            self.max_message_bytes,
            "max_message_bytes",
            Integral,
            at_least=1,
            at_most=_MAX_GRPC_INT,
        )
        require_type(self.service_config, "service_config", str, None)
        require_type(self.server_name, "server_name", str, None)

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
            # gRPC waits a second before it reconnects, but a server that restarts or has just
            # started should be found sooner.
            ("grpc.initial_reconnect_backoff_ms", min(200, backoff_ms)),
            ("grpc.max_reconnect_backoff_ms", backoff_ms),
            ("grpc.client_idle_timeout_ms", round(self.idle_timeout_s * 1e3)),
            # Channels to one target would otherwise share one connection.
            ("grpc.use_local_subchannel_pool", 1),
            *spread,
            *name,
        )
