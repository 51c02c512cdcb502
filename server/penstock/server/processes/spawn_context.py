"""What the supervisor hands to processes at their start.

Owns the values alone.
"""

from dataclasses import dataclass
from pathlib import Path

from penstock.server.config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnContext:
    """Resources that outlive any process of the service.

    `config`: the settings in force, with the resolved port. `socket_path`: the engine's socket;
    `listener_fd`: its listening socket. `observer_path`: the observer's socket, None without an
    observer. `flight_fd`: the flight recorder's memory, -1 without one. `board_fd`, `beats_fd`: see
    `penstock.server.link.board`. `started_s`: when the service started, monotonic clock.
    """

    config: ServerConfig
    socket_path: Path
    listener_fd: int
    observer_path: Path | None
    flight_fd: int
    board_fd: int
    beats_fd: int
    started_s: float
