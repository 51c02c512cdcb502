"""How patient one front is with connections and with calls that are only begun: frozen values.

Owns the bounds. What enforces them is the gRPC core (`rpc/options.py`) and `rpc/arrival.py`.
"""

from dataclasses import dataclass

from penstock.scheduler.setting import check, setting

_MAX_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Bounds of one front. Raises SettingError naming the field that is off.

    More than `max_connections` are refused, whoever they are, so that a flood of them cannot take
    all memory and descriptors. `max_connection_age_s`, give or take a tenth: then a connection is
    told to take no more calls, and its client makes another, which may find another server.
    """

    max_connections: int = setting(
        2000,
        "connections",
        "connections that one front holds open at a time",
        at_least=1,
        at_most=1_000_000,
    )
    handshake_timeout_s: float = setting(
        10.0,
        "connections",
        "seconds for the greetings of TLS and HTTP/2 on a new connection",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    max_arrival_s: float = setting(
        30.0,
        "connections",
        "seconds that the message of a call may take to arrive",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    max_connection_age_s: float = setting(
        1800.0,
        "connections",
        "seconds after which a connection takes no more calls, so that clients spread anew",
        above=0,
        at_most=_MAX_WAIT_S,
    )

    def __post_init__(self) -> None:
        check(self)
