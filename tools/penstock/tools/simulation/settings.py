"""The settings of a simulated server: batching policy, limits, KV cache, cost model, latency
targets.

Also builds from them the engine and the gate, which holds requests back for static and dynamic
batching.
"""

import enum
import math
from dataclasses import dataclass, field, replace

from penstock.executor import limit_texts
from penstock.executor.config import (
    DEFAULT_BLOCK_SIZE,
    ExecutorConfig,
    ExecutorKind,
    SimulatedConfig,
)
from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder, check_step_tokens
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.setting import check, from_factory, setting
from penstock.server.observe.recording.trace import MAX_REQUEST_TOKENS
from penstock.tools.simulation.gate import BatchGate, Gate, OpenGate
from penstock.tools.simulation.watched_executor import OutputLength, PrefillWatcher, WatchedExecutor
from penstock.tools.targets import Targets

_DEFAULT_MAX_SEQ_LEN = 262_144
UNBOUNDED_QUEUE = SchedulerConfig(max_num_waiting=1_000_000, max_num_waiting_tokens=2**62)


class BatchingPolicy(enum.StrEnum):
    """How requests are admitted.

    FCFS: in-flight batching, first come, first served. FAIR: in-flight batching in the scheduler's
    fair order. STATIC: a full batch runs to its end before the next one is admitted. DYNAMIC: like
    STATIC, but a batch starts after a limited wait even if it is not full.
    """

    FCFS = "fcfs"
    FAIR = "fair"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The settings of one simulated server. Raises SettingError, naming the field, if one is
    invalid here or for the engine.

    The upper bounds of the settings reject values that would exhaust memory.

    Attributes:
        scheduler: All scheduler settings except the order, which the policy sets; by default the
            queue is unbounded.
        max_tokens: The `max_tokens` of requests, or their output length if that is greater; a
            shorter output ends with a stop result. None: a request's `max_tokens` is its output
            length, as with `ignore_eos`, so the scheduler has every output length in advance.
        timeline_bin_s: Width of the bins in which output tokens are counted, seconds.
    """

    policy: BatchingPolicy = setting(
        BatchingPolicy.FCFS, "server", "admission of requests; see docs/simulation.md", shown="fair"
    )
    cost: CostModel = from_factory(
        CostModel,
        "cost",
        "cost model of a step; docs/settings.md lists the keys of step_cost",
        needs_all=True,
        shown="example values",
    )
    targets: Targets = field(default_factory=Targets)
    max_num_seqs: int = setting(256, "server", limit_texts.MAX_NUM_SEQS, at_least=1, at_most=2**16)
    num_blocks: int = setting(16_384, "server", limit_texts.NUM_BLOCKS, at_least=1, at_most=2**24)
    block_size: int = setting(
        DEFAULT_BLOCK_SIZE, "server", limit_texts.BLOCK_SIZE, at_least=1, at_most=2**16
    )
    max_seq_len: int = setting(
        _DEFAULT_MAX_SEQ_LEN,
        "server",
        limit_texts.MAX_SEQ_LEN,
        at_least=2,
        at_most=MAX_REQUEST_TOKENS,
    )
    scheduler: SchedulerConfig = field(default_factory=lambda: UNBOUNDED_QUEUE)
    batch_size: int | None = setting(
        None, "server", "size of static and dynamic batches", at_least=1, shown="max-num-seqs"
    )
    batch_wait_s: float = setting(
        0.5,
        "server",
        "dynamic: maximum wait for a full batch, seconds",
        at_least=0,
        may_be_infinite=True,
    )
    max_tokens: int | None = setting(
        None,
        "server",
        "max_tokens of each request, or its length in the trace if longer; the output ends at the"
        " length in the trace, which the scheduler does not know",
        at_least=1,
        shown="the length in the trace",
    )
    has_prefix_caching: bool = setting(
        True, text="whether requests reuse cached blocks of equal prefixes"
    )
    front_s: float = setting(
        0.0,
        "server",
        "part of TTFT and total time outside the engine (fronts, network), milliseconds",
        name="front_ms",
        scale=1e-3,
        at_least=0,
    )
    timeline_bin_s: float = setting(
        10.0, text="bin width of the timeline, seconds", above=0, may_be_infinite=True
    )
    sample_every_steps: int = setting(
        8, text="steps per sample of KV cache use and queue length", at_least=1
    )

    def __post_init__(self) -> None:
        check(self)
        _executor_config(self)
        check_step_tokens(
            self.scheduler.max_num_batched_tokens,
            self.max_num_seqs,
            "scheduler.max_num_batched_tokens",
            "max_num_seqs",
        )


def build_engine(
    config: SimulationConfig,
    clock: VirtualClock,
    on_prefill: PrefillWatcher,
    output_length: OutputLength,
) -> Engine:
    """Build the production engine with the simulated executor, both on `clock`. `on_prefill`,
    `output_length`: see `WatchedExecutor`; `output_length` is used only if `config.max_tokens` is
    set.
    """
    executor = WatchedExecutor(
        _executor_config(config),
        clock,
        on_prefill,
        None if config.max_tokens is None else output_length,
    )
    order = SchedulingOrder.FAIR if config.policy is BatchingPolicy.FAIR else SchedulingOrder.FCFS
    return Engine(executor, replace(config.scheduler, order=order), clock)


def _executor_config(config: SimulationConfig) -> ExecutorConfig:
    return ExecutorConfig(
        kind=ExecutorKind.SIMULATED,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_seq_len=config.max_seq_len,
        pipeline_depth=1,
        simulated=SimulatedConfig(cost=config.cost),
    )


def build_gate(config: SimulationConfig) -> Gate:
    """Build the gate that implements the batching policy."""
    size = config.batch_size or config.max_num_seqs
    match config.policy:
        case BatchingPolicy.FCFS | BatchingPolicy.FAIR:
            return OpenGate()
        case BatchingPolicy.STATIC:
            return BatchGate(batch_size=size, max_wait_s=math.inf)
        case BatchingPolicy.DYNAMIC:
            return BatchGate(batch_size=size, max_wait_s=config.batch_wait_s)
