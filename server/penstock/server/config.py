"""The settings of the service, and how they are passed to its processes.

Defines `ServerConfig`, the groups in which settings are displayed, and the launch parameters of
each child process. Does not read environment variables or arguments; the command line does that
once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from penstock.conventions import DEFAULT_HOST, DEFAULT_PORT, MAX_PORT
from penstock.executor.config import ExecutorConfig
from penstock.scheduler.config import SchedulerConfig, check_step_tokens
from penstock.scheduler.setting import SettingError, check, from_factory, required, setting
from penstock.server.engine.quarantine import SuspectedRequest
from penstock.server.front.config import FrontConfig
from penstock.server.gateways import NO_GATEWAY
from penstock.server.observe.config import DEFAULT_MAX_RECORD_BYTES, ObserverConfig
from penstock.server.observe.logs import AUTO_FORMAT, LOG_FORMATS, LOG_LEVELS
from penstock.server.security.config import SecurityConfig
from penstock.server.settings.table import declared
from penstock.server.usable_cores import num_usable_cores

MAX_NUM_FRONTS = 16

LaunchT = TypeVar("LaunchT", "EngineLaunch", "FrontLaunch", "ObserverLaunch")


def default_num_fronts() -> int:
    """Return half the number of usable cores, at least 1 and at most MAX_NUM_FRONTS. The other
    cores are for the engine."""
    return max(1, min(MAX_NUM_FRONTS, num_usable_cores() // 2))


GROUPS = {
    "model": "model",
    "network": "network",
    "security": "security",
    "executor": "executor",
    "batching": "batching",
    "cache": "KV cache, sessions and retention",
    "queue": "queue",
    "tenants": "tenants",
    "deadlines": "deadlines",
    "requests": "limits of requests",
    "delivery": "delivery",
    "connections": "connections",
    "survival": "replay, resume, hangs and drain",
    "observability": "metrics, traces, flight recorder and operations",
    "recording": "recording",
    "log": "log",
}
"""Groups of settings in display order, with their headings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one service: one model, one engine, and the fronts (gRPC server processes) on one
    port.

    `tokenizer_path` is the folder with the tokenizer and the chat template; None means the model's
    folder. Shutdown completes within four seconds after `drain_timeout_s`, or later if the
    executor needs longer to exit (`ExecutorConfig.max_exit_s`). `front.front_id` is a
    placeholder that each front replaces by its own id. If `record_path` is set, the engine records
    its steps and its requests in two files in that folder; `record_max_bytes` limits the size of
    each file. An invalid value raises SettingError, which names the field.
    """

    model_path: Path = required(
        "model",
        "model folder (Hugging Face layout), or demo for the one in the package",
        name="model",
        kind=str,
        is_everyday=True,
        shown="demo",
    )
    model: str = required(
        "model",
        "model name that clients use",
        name="model_name",
        is_everyday=True,
        shown="the folder's",
    )
    tokenizer_path: Path | None = setting(
        None,
        "model",
        "Hugging Face folder with tokenizer and chat template",
        name="tokenizer",
        metavar="FOLDER",
        shown="the model's",
    )
    executor: ExecutorConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    front: FrontConfig = field(default_factory=FrontConfig)
    observer: ObserverConfig = field(default_factory=ObserverConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    host: str = setting(DEFAULT_HOST, "network", "address to listen on", is_everyday=True)
    port: int = setting(
        DEFAULT_PORT,
        "network",
        "port to listen on, 0 for any free one",
        at_least=0,
        at_most=MAX_PORT,
        is_everyday=True,
    )
    num_fronts: int = from_factory(
        default_num_fronts,
        "network",
        "front processes",
        name="fronts",
        at_least=1,
        at_most=MAX_NUM_FRONTS,
        is_everyday=True,
        shown="cores / 2",
    )
    drain_timeout_s: float = setting(
        30.0, "survival", "seconds that streams may run after the first signal", at_least=0
    )
    engine_hang_s: float = setting(
        30.0,
        "survival",
        "seconds without a heartbeat after which an engine is killed and restarted, more than its"
        " longest step takes; 0 for never",
        may_be_zero=True,
        at_least=2,
    )
    front_hang_s: float = setting(
        10.0,
        "survival",
        "seconds without a heartbeat after which a front is killed and restarted; 0 for never",
        may_be_zero=True,
        at_least=2,
    )
    log_level: str = setting(
        "info", "log", "lowest level that is logged", choices=LOG_LEVELS, is_everyday=True
    )
    log_format: str = setting(
        AUTO_FORMAT,
        "log",
        "a line of the log: short text, text with process id and module, or one JSON object;"
        " auto: short where stderr is a terminal, text elsewhere",
        choices=LOG_FORMATS,
    )
    log_exception_messages: bool = setting(
        False,
        "log",
        "whether the log contains the messages of library exceptions, which may quote clients'"
        " data",
    )
    record_path: Path | None = setting(
        None,
        "recording",
        "record steps and requests (lengths and times, no text) for penstock simulate",
        name="record",
        metavar="DIR",
        shown="none",
    )
    record_max_bytes: int = setting(
        DEFAULT_MAX_RECORD_BYTES,
        "recording",
        "largest size of each of the two recorded files, MiB",
        name="record_max_mib",
        scale=1024 * 1024,
        at_least=1,
    )
    gateway: str = setting(
        NO_GATEWAY,
        "network",
        "gateway protocol to serve on the same port: smg for the gateway of that name, an"
        " OpenAI-compatible HTTP server in front of many workers (extra gateway)",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("model", "host"):
            if not getattr(self, name):
                raise SettingError("{} must not be empty", name)
        check_step_tokens(
            self.scheduler.max_num_batched_tokens,
            self.executor.max_num_seqs,
            "scheduler.max_num_batched_tokens",
            "executor.max_num_seqs",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """The launch parameters of an engine process.

    Attributes:
        listener_fd: The inherited listening Unix socket. It stays open when an engine dies; fronts
            that connect while no engine runs wait in its backlog.
        epoch: Number of the engine start, from 1; increases with every start.
        flight_fd: Descriptor of the flight recorder's shared memory, -1 without a flight recorder.
        board_fd: Descriptor of the engine's status board in shared memory, -1 without a board.
        suspects: Requests that may have crashed an earlier engine.
    """

    server: ServerConfig
    socket_path: Path
    listener_fd: int
    epoch: int
    flight_fd: int = -1
    board_fd: int = -1
    suspects: tuple[SuspectedRequest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLaunch:
    """The launch parameters of a front process.

    `socket_path` is the Unix socket of the engine. `port` is the actual port, already reserved by
    the supervisor. `observer_path` is the socket on which the observer listens, None without an
    observer. `board_fd` is the descriptor of the engine's status board. `heartbeats_fd` is the
    descriptor of the fronts' heartbeats in shared memory, a table in which this front writes row
    `heartbeat_row`. Both descriptors are inherited; -1 means that there is none.
    """

    server: ServerConfig
    socket_path: Path
    front_id: int
    port: int
    observer_path: Path | None = None
    board_fd: int = -1
    heartbeats_fd: int = -1
    heartbeat_row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverLaunch:
    """The launch parameters of an observer process.

    The ports are the actual ones, already reserved by the supervisor; None for a port that is not
    opened.

    Attributes:
        socket_path: The Unix socket of the engine.
        listener_fd: The inherited listening Unix socket to which fronts connect.
        flight_fd, board_fd: As in `EngineLaunch`.
        started_s: Start of the service in seconds on the monotonic clock.
    """

    server: ServerConfig
    socket_path: Path
    listener_fd: int
    flight_fd: int
    metrics_port: int | None
    operations_port: int | None
    started_s: float
    board_fd: int = -1


SETTINGS = declared(ServerConfig)
"""The settings of `penstock serve`."""


def encode_launch(launch: EngineLaunch | FrontLaunch | ObserverLaunch) -> bytes:
    """Encode launch parameters as MessagePack, to send them to the child process.

    Raises TypeError if a setting has a type that `decode_launch` could not restore.
    """
    # Imported here because `penstock serve --help` must work without the server's dependencies.
    import msgspec

    return msgspec.msgpack.encode(launch, enc_hook=_encode_path)


def decode_launch(kind: type[LaunchT], data: bytes) -> LaunchT:
    """Return the launch parameters of type `kind` that `encode_launch` encoded as `data`."""
    import msgspec

    return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda kind, text: kind(text))


def _encode_path(value: object) -> str:
    """Return the text of a path. Raises TypeError for any other type, because `decode_launch` could
    not restore the value."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"launch parameters must not contain a {type(value).__name__}")
