"""Limits of connections and of incomplete calls: frozen values.

Enforced by the gRPC core (`rpc/options.py`) and `rpc/read_limiter.py`.
"""

from dataclasses import dataclass

from penstock.scheduler.setting import check, setting

_MAX_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Bounds of one front. Raises SettingError naming the invalid field.

    Connections beyond `max_connections` are refused, so that a flood of them cannot take all memory
    and descriptors. After `max_connection_age_s`, give or take a tenth, a connection takes no more
    calls, and its client opens another, which may reach another server.
    """

    max_connections: int = setting(
        2000,
        "connections",
        "open connections of one front",
        at_least=1,
        at_most=1_000_000,
    )
    handshake_timeout_s: float = setting(
        10.0,
        "connections",
        "seconds for the TLS and HTTP/2 handshakes of a new connection",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    max_arrival_s: float = setting(
        30.0,
        "connections",
        "seconds that a request message may take to arrive",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    max_connection_age_s: float = setting(
        1800.0,
        "connections",
        "seconds after which a connection takes no more calls, so that clients reconnect and"
        " spread",
        above=0,
        at_most=_MAX_WAIT_S,
    )

    def __post_init__(self) -> None:
        check(self)
