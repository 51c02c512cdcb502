"""A snapshot of the service for operators.

Owns the values, which mirror `penstock.v1.ServerStats` without protobuf. Durations are seconds;
None: unknown.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of a duration in seconds over the last minute; None without values."""

    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    num: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """The KV cache in blocks; used + cached + free = total."""

    block_size_tokens: int = 0
    num_total_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """One model's engine. The rates are over the last ten seconds; totals since its start."""

    model: str
    is_up: bool
    epoch: int = 0
    num_pending: int = 0
    num_processing: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    cache: CacheSnapshot = CacheSnapshot()
    num_accepted: int = 0
    num_refused: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    mean_step_s: float | None = None
    estimated_queue_s: float | None = None
    num_engine_restarts: int = 0
    ttft: Percentiles = Percentiles()
    itl: Percentiles = Percentiles()
    queue: Percentiles = Percentiles()
    e2e: Percentiles = Percentiles()
    waits_for: str = ""
    """What the queue's head lacks, a name of `WaitReason`; empty if the queue is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSnapshot:
    """One front process."""

    index: int
    pid: int
    num_streams: int
    num_live: int
    num_backlog_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The service. `time_s`: seconds since 1970."""

    time_s: float
    uptime_s: float
    is_draining: bool
    models: tuple[ModelSnapshot, ...]
    fronts: tuple[FrontSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """An entry of a request's history: the phase and its start, seconds since 1970."""

    phase: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One live request, without its content. Ages and times in seconds; `arrival_s` since 1970.

    `state`: PENDING or PROCESSING. `waits_for`: as in `ModelSnapshot`, only while PENDING.
    """

    request_id: str
    model: str
    tenant: str
    state: str
    phase: str
    waits_for: str
    queue_position: int | None
    priority: int
    arrival_s: float
    age_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    num_backlog_tokens: int
    time_to_deadline_s: float | None
    trace_id: str
    history: tuple[PhaseChange, ...] = ()
