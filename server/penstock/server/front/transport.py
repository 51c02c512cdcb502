"""How patient one front is with connections and with calls that are only begun: frozen values.

Owns the bounds. What enforces them is the gRPC core (`rpc/options.py`) and `rpc/arrival.py`.
"""

import math
from dataclasses import dataclass

_MAX_CONNECTIONS = 1_000_000
_MAX_WAIT_S = 86_400.0
_WAITS = ("handshake_timeout_s", "max_arrival_s", "max_connection_age_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Bounds of one front. Raises ValueError naming the field that is off.

    `max_connections`: open at a time; more are refused, whoever they are, so that a flood of them
    cannot take all memory and descriptors. `handshake_timeout_s`: for TLS and the greetings of
    HTTP/2. `max_arrival_s`: how long the message of a call that is begun may take to arrive.
    `max_connection_age_s`, give or take a tenth: then a connection is told to take no more calls,
    and its client makes another, which may find another server.
    """

    max_connections: int = 2000
    handshake_timeout_s: float = 10.0
    max_arrival_s: float = 30.0
    max_connection_age_s: float = 1800.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_connections <= _MAX_CONNECTIONS:
            raise ValueError(f"max_connections must be in 1..{_MAX_CONNECTIONS}")
        for name in _WAITS:
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= _MAX_WAIT_S):
                raise ValueError(f"{name} must be above 0 and at most {_MAX_WAIT_S:.0f} seconds")
