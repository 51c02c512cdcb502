"""What is there before any process of the service, and outlives each.

Owns the values alone.
"""

from dataclasses import dataclass
from pathlib import Path

from penstock.server.config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the supervisor knows when a process is started.

    `config`: the settings in force, with the port that was found. `socket_path`: the engine's
    link; `listener_fd`: its listening socket. `observer_path`: where the observer listens, None
    when there is none. `flight_fd`: the flight recorder's memory, -1 without one. `board_fd`,
    `beats_fd`: see `penstock.server.link.board`. `started_s`: when the service was, monotonic
    clock.
    """

    config: ServerConfig
    socket_path: Path
    listener_fd: int
    observer_path: Path | None
    flight_fd: int
    board_fd: int
    beats_fd: int
    started_s: float
