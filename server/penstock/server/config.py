"""The service's settings, and their way to the processes that make it up.

Owns `ServerConfig`, what each child process is launched with, and the JSON form of both. Reads no
environment and no arguments: the command line does, once.
"""

import json
import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from penstock.executor.config import ExecutorConfig
from penstock.executor.config_json import from_json_value, to_json_value
from penstock.scheduler.config import SchedulerConfig
from penstock.server.facades import NO_FACADE
from penstock.server.front.config import FrontConfig
from penstock.server.link.suspect import Suspect
from penstock.server.logs import LOG_FORMATS, LOG_LEVELS
from penstock.server.security.config import SecurityConfig
from penstock.server.telemetry.config import ObserverConfig

MAX_NUM_FRONTS = 16

LaunchT = TypeVar("LaunchT", "EngineLaunch", "FrontLaunch", "ObserverLaunch")


def default_num_fronts() -> int:
    """Half of the usable cores, at least one: the engine and its threads need the rest."""
    return max(1, min(MAX_NUM_FRONTS, num_usable_cores() // 2))


def num_usable_cores() -> int:
    """Cores this process may run on (containers and taskset narrow it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One service: a model, an engine and fronts on one port. Raises ValueError naming the field.

    `model`: the name that clients use. `model_path`: its folder. `tokenizer_path`: the folder that
    fronts read tokenizer and chat template from, None for the model's. `port` 0: any free one.
    `drain_grace_s`: how long streams may go on after the first SIGTERM or SIGINT; the service is
    gone two seconds later. `engine_hang_s`, `front_hang_s`: an engine or a front that has not come
    round for so long is killed and followed by another; 0: never. `front.front_id` is a
    placeholder: each front gets its own.
    `record_path`: the folder in which the engine writes down its steps and requests, None for
    nowhere; `record_max_bytes` bounds each of the two files. `facade`: which contract of others is
    served on the same port, one of FACADES.
    """

    model: str
    model_path: Path
    tokenizer_path: Path | None = None
    executor: ExecutorConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    front: FrontConfig = field(default_factory=FrontConfig)
    observer: ObserverConfig = field(default_factory=ObserverConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    host: str = "127.0.0.1"
    port: int = 50051
    num_fronts: int = field(default_factory=default_num_fronts)
    drain_grace_s: float = 30.0
    engine_hang_s: float = 30.0
    front_hang_s: float = 10.0
    log_level: str = "info"
    log_format: str = "text"
    log_foreign_text: bool = False
    record_path: Path | None = None
    record_max_bytes: int = 256 * 1024 * 1024
    facade: str = NO_FACADE

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty")
        if not self.host:
            raise ValueError("host must not be empty")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in 0..65535, not {self.port}")
        if not 1 <= self.num_fronts <= MAX_NUM_FRONTS:
            raise ValueError(f"num_fronts must be in 1..{MAX_NUM_FRONTS}, not {self.num_fronts}")
        if not (self.drain_grace_s >= 0 and math.isfinite(self.drain_grace_s)):
            raise ValueError(f"drain_grace_s must be 0 or more, not {self.drain_grace_s}")
        _check_limit("engine_hang_s", self.engine_hang_s)
        _check_limit("front_hang_s", self.front_hang_s)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        if self.record_max_bytes < 1:
            raise ValueError(f"record_max_bytes must be at least 1, not {self.record_max_bytes}")
        num_tokens, num_seqs = self.scheduler.max_num_batched_tokens, self.executor.max_num_seqs
        if num_tokens < num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({num_seqs}),"
                f" not {num_tokens}"
            )


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}")


def _check_limit(name: str, limit_s: float) -> None:
    if not (limit_s == 0 or (limit_s >= 2 and math.isfinite(limit_s))):
        raise ValueError(f"{name} must be 0 or at least 2, not {limit_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """What an engine process starts from.

    `listener_fd`: the listening Unix socket, inherited; it outlives every engine, so fronts that
    connect while none runs wait in its backlog. `epoch` grows with every start. `flight_fd`: the
    memory of the flight recorder, inherited; -1 where there is none. `board_fd`: likewise the
    engine's board. `suspects`: who may have killed an earlier engine.
    """

    server: ServerConfig
    socket_path: Path
    listener_fd: int
    epoch: int
    flight_fd: int = -1
    board_fd: int = -1
    suspects: tuple[Suspect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLaunch:
    """What a front process starts from. `port` is the real one, reserved by the supervisor.

    `observer_path`: the socket that the observer listens on, None when there is no observer.
    `board_fd`: the engine's board; `beats_fd`: the heartbeats of fronts, of which `beat_row` is
    this one's; both inherited, -1 where there is none.
    """

    server: ServerConfig
    socket_path: Path
    front_id: int
    port: int
    observer_path: Path | None = None
    board_fd: int = -1
    beats_fd: int = -1
    beat_row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverLaunch:
    """What an observer process starts from.

    `socket_path`: the engine's link. `listener_fd`: the listening Unix socket that fronts connect
    to, inherited; `flight_fd` and `board_fd` as in `EngineLaunch`. The ports are the real ones,
    reserved by the supervisor; None for none. `started_s`: when the service was, on the monotonic
    clock.
    """

    server: ServerConfig
    socket_path: Path
    listener_fd: int
    flight_fd: int
    metrics_port: int | None
    operations_port: int | None
    started_s: float
    board_fd: int = -1


def launch_to_json(launch: EngineLaunch | FrontLaunch | ObserverLaunch) -> str:
    """One line of JSON."""
    return json.dumps(to_json_value(launch))


def launch_from_json(kind: type[LaunchT], text: str) -> LaunchT:
    """The launch again. Raises ValueError naming the field."""
    return from_json_value(kind, json.loads(text))
