"""What a server reports to its operators, as frozen values.

Owns the shapes. Durations are seconds, moments seconds since 1970-01-01 UTC; None: not known.
"""

import enum
from dataclasses import dataclass

from penstock.client.events import RequestState, Timings, Usage, WaitReason
from penstock.client.model_info import ModelState


class RequestPhase(enum.IntEnum):
    """What a live request does. UNKNOWN: a phase that is newer than this client."""

    UNKNOWN = -1
    UNSPECIFIED = 0
    PREPARE = 1
    QUEUE = 2
    PREFILL = 3
    DECODE = 4
    DELIVER = 5


class LogLevel(enum.IntEnum):
    """How severe what a server logs must at least be."""

    DEBUG = 1
    INFO = 2
    WARNING = 3
    ERROR = 4


class ServerProcess(enum.IntEnum):
    """A kind of process of a server."""

    ENGINE = 1
    FRONT = 2
    OBSERVER = 3


class FlightFormat(enum.IntEnum):
    """How a flight record is written as a file.

    PERFETTO opens in ui.perfetto.dev; RAW is read by `penstock timeline` and `penstock simulate`.
    """

    PERFETTO = 2
    RAW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """How a duration was spread over the last minute, to within one percent; None: no value."""

    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    num_values: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The KV cache in blocks; used + cached + free = total."""

    block_size_tokens: int
    num_total_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTotals:
    """Counts since the server started. Cancelled requests are among the completed ones."""

    num_accepted: int
    num_refused: int
    num_completed: int
    num_cancelled: int
    num_failed: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStats:
    """How full one model's engine is, and what it has done.

    Speeds and `mean_step_s` are over the last ten seconds. `ttft`, `queue` and `e2e` are of
    requests that ended in the last minute, `itl` of all tokens of the last minute. `wait_reason`:
    what the next in line lacks.
    """

    model: str
    state: ModelState
    num_pending: int
    num_processing: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache: CacheStats
    totals: ModelTotals
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    mean_step_s: float | None
    estimated_queue_s: float | None
    num_engine_restarts: int
    engine_epoch: int
    ttft: Percentiles
    itl: Percentiles
    queue: Percentiles
    e2e: Percentiles
    wait_reason: WaitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontStats:
    """One front process. `num_backlog_tokens`: output that readers have not taken."""

    index: int
    pid: int
    num_streams: int
    num_live_requests: int
    num_backlog_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """A snapshot of a server, taken at `time_s`."""

    time_s: float
    uptime_s: float
    is_draining: bool
    models: tuple[ModelStats, ...]
    fronts: tuple[FrontStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """A live request entered a phase."""

    phase: RequestPhase
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request that has not ended, without its content. `timings.total_s` is its age.

    `queue_position` (0 is next) and `wait_reason` only while it is PENDING. `trace_id`: 32
    hexadecimal digits, "" if it is not traced.
    """

    request_id: str
    model: str
    tenant: str
    state: RequestState
    phase: RequestPhase
    wait_reason: WaitReason
    queue_position: int | None
    priority: int
    arrival_s: float
    usage: Usage
    timings: Timings
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    num_backlog_tokens: int
    time_to_deadline_s: float | None
    trace_id: str
    history: tuple[PhaseChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """How far one output's prompt was computed in a step."""

    request_id: str
    output_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of an engine, as its flight recorder kept it.

    `scheduler_s`: deciding what runs and taking in the result; `executor_s`: from launch to
    result; `predicted_s`: what that was expected to be. `inter_token_s`: since the step before, for
    the `num_inter_token` outputs who got a token of both. Request ids are those that the recorder
    still had; numbers are exact.
    """

    step: int
    launch_s: float
    scheduler_s: float
    executor_s: float
    predicted_s: float | None
    inter_token_s: float | None
    num_inter_token: int
    num_prefill_tokens: int
    num_prefill_requests: int
    num_decode_requests: int
    num_context_tokens: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_admitted: int
    num_preempted: int
    num_finished: int
    num_failed: int
    wait_reason: WaitReason
    shares: tuple[StepShare, ...]
    admitted_request_ids: tuple[str, ...]
    preempted_request_ids: tuple[str, ...]
    ended_request_ids: tuple[str, ...]
    cache: CacheStats
