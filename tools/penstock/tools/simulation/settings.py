"""What a simulated server is: policy, limits, memory, costs, targets.

Owns the values and the making of an engine from them.
"""

import enum
import math
from dataclasses import dataclass, field, replace

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.simulated.pace import VirtualClock
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.server.recording.trace import MAX_REQUEST_TOKENS
from penstock.tools.simulation.gate import BatchGate, Gate, OpenGate
from penstock.tools.simulation.watched_executor import (
    OutputLength,
    PrefillWatcher,
    WatchedExecutor,
)

DEFAULT_NUM_BLOCKS = 16_384
DEFAULT_MAX_SEQ_LEN = 262_144
UNBOUNDED_QUEUE = SchedulerConfig(max_num_waiting=1_000_000, max_num_waiting_tokens=2**62)
_VOCAB_SIZE = 32_000
_MOST = {
    "num_blocks": 2**24,
    "block_size": 2**16,
    "max_num_seqs": 2**16,
    "max_seq_len": MAX_REQUEST_TOKENS,
}
"""What is more is a mistake, which would be found out when memory has run out."""


class Policy(enum.StrEnum):
    """How requests get in.

    FCFS: in-flight batching, first come first served. FAIR: in-flight batching in the scheduler's
    fair order. STATIC: a full batch, run to its end, then the next. DYNAMIC: the same, but a batch
    waits only so long to fill.
    """

    FCFS = "fcfs"
    FAIR = "fair"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a good request gets: its first token in time, and 99 % of its gaps no longer."""

    ttft_s: float = 1.0
    itl_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """One simulated server. Raises ValueError naming the field; the engine's own limits too.

    `scheduler`: everything but the order, which the policy decides; by default no trace meets the
    queue's bound. `batch_size` (None: `max_num_seqs`) and `batch_wait_s` are for STATIC and
    DYNAMIC.
    `max_tokens`: how many tokens requests ask for, if they do not generate more; None: as many as
    they generate, which tells the scheduler more than it would know of a model.
    `front_s`: what a request spends outside the engine, on its way in and its answer's out: part
    of every TTFT and E2E time, and of nothing else.
    `timeline_bin_s`: width of the bins of served tokens. `sample_every_steps`: how often memory
    and queue are sampled.
    """

    policy: Policy = Policy.FCFS
    cost: CostModel = field(default_factory=CostModel)
    targets: Targets = field(default_factory=Targets)
    max_num_seqs: int = 256
    num_blocks: int = DEFAULT_NUM_BLOCKS
    block_size: int = 16
    max_seq_len: int = DEFAULT_MAX_SEQ_LEN
    scheduler: SchedulerConfig = field(default_factory=lambda: UNBOUNDED_QUEUE)
    batch_size: int | None = None
    batch_wait_s: float = 0.5
    max_tokens: int | None = None
    has_prefix_caching: bool = True
    front_s: float = 0.0
    timeline_bin_s: float = 10.0
    sample_every_steps: int = 8

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, not {getattr(self, name)}")
        _executor_config(self)
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        if not self.batch_wait_s >= 0.0:
            raise ValueError(f"batch_wait_s must not be negative, not {self.batch_wait_s}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not (math.isfinite(self.front_s) and self.front_s >= 0.0):
            raise ValueError(f"front_s must be finite and not negative, not {self.front_s}")
        if not self.timeline_bin_s > 0.0:
            raise ValueError(f"timeline_bin_s must be positive, not {self.timeline_bin_s}")
        if self.sample_every_steps < 1:
            raise ValueError("sample_every_steps must be at least 1")
        if self.scheduler.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")


def build_engine(
    config: SimulationConfig,
    clock: VirtualClock,
    on_prefill: PrefillWatcher,
    output_length: OutputLength,
) -> Engine:
    """The production engine over the simulated executor, both on `clock`."""
    executor = WatchedExecutor(
        _executor_config(config),
        clock,
        on_prefill,
        None if config.max_tokens is None else output_length,
    )
    order = SchedulingOrder.FAIR if config.policy is Policy.FAIR else SchedulingOrder.FCFS
    return Engine(executor, replace(config.scheduler, order=order), clock)


def _executor_config(config: SimulationConfig) -> ExecutorConfig:
    return ExecutorConfig(
        kind=ExecutorKind.SIMULATED,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_seq_len=config.max_seq_len,
        pipeline_depth=1,
        simulated=SimulatedConfig(vocab_size=_VOCAB_SIZE, cost=config.cost),
    )


def build_gate(config: SimulationConfig) -> Gate:
    """The gate that makes the policy."""
    size = config.batch_size or config.max_num_seqs
    match config.policy:
        case Policy.FCFS | Policy.FAIR:
            return OpenGate()
        case Policy.STATIC:
            return BatchGate(batch_size=size, max_wait_s=math.inf)
        case Policy.DYNAMIC:
            return BatchGate(batch_size=size, max_wait_s=config.batch_wait_s)
