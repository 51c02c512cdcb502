"""How a connection is opened: target, credentials and channel options.

Owns the options both clients share. Does not open anything.
"""

from dataclasses import dataclass

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Where `penstock serve` listens unless told otherwise."""

MIN_KEEPALIVE_S = 20.0
"""Servers disconnect clients that ping much more often than this."""


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
