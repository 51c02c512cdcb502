"""The settings of a simulated server: policy, limits, memory, costs, targets.

Owns the values and builds an engine from them.
"""

import enum
import math
from dataclasses import dataclass, field, replace

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.simulated.pace import VirtualClock
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.setting import SettingError, check, made_by, setting
from penstock.server.observe.recording.trace import MAX_REQUEST_TOKENS
from penstock.tools.simulation.gate import BatchGate, Gate, OpenGate
from penstock.tools.simulation.watched_executor import OutputLength, PrefillWatcher, WatchedExecutor
from penstock.tools.targets import Targets

DEFAULT_MAX_SEQ_LEN = 262_144
UNBOUNDED_QUEUE = SchedulerConfig(max_num_waiting=1_000_000, max_num_waiting_tokens=2**62)
_VOCAB_SIZE = 32_000


class Policy(enum.StrEnum):
    """How requests are admitted.

    FCFS: in-flight batching, first come, first served. FAIR: in-flight batching in the scheduler's
    fair order. STATIC: a full batch, run to its end, then the next. DYNAMIC: like STATIC, but a
    batch waits a limited time to fill.
    """

    FCFS = "fcfs"
    FAIR = "fair"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """One simulated server. Raises SettingError naming the field, also for limits of the engine.

    `scheduler`: all settings but the order, which the policy decides; by default the queue is not
    bounded for any trace. `max_tokens`: the limit that requests ask for, unless they generate more;
    a shorter output ends by itself. None: the limit is the output length, as with `ignore_eos`, so
    that the scheduler knows every length in advance. `timeline_bin_s`: width of the bins of served
    tokens. `sample_every_steps`: how often memory and queue are sampled. The upper bounds reject
    mistakes that would otherwise exhaust memory.
    """

    policy: Policy = setting(
        Policy.FCFS, "server", "how requests get in; docs/simulation.md", shown="fair"
    )
    cost: CostModel = made_by(
        CostModel,
        "cost",
        "the cost model: all four prices, 0 to 3600 seconds each, by name of field",
        needs_all=True,
        shown="made up",
    )
    targets: Targets = field(default_factory=Targets)
    max_num_seqs: int = setting(256, "server", "requests that run at once", at_most=2**16)
    num_blocks: int = setting(16_384, "server", "blocks in the KV cache", at_most=2**24)
    block_size: int = setting(16, "server", "tokens per block", at_most=2**16)
    max_seq_len: int = setting(
        DEFAULT_MAX_SEQ_LEN, "server", "prompt and output, in tokens", at_most=MAX_REQUEST_TOKENS
    )
    scheduler: SchedulerConfig = field(default_factory=lambda: UNBOUNDED_QUEUE)
    batch_size: int | None = setting(
        None, "server", "of static and dynamic batches", at_least=1, shown="max-num-seqs"
    )
    batch_wait_s: float = setting(
        0.5, "server", "dynamic: seconds for a batch to fill", at_least=0, may_be_infinite=True
    )
    max_tokens: int | None = setting(
        None,
        "server",
        "tokens that each request asks for, or its length in the trace if longer; it ends by itself"
        " at that length, which the scheduler does not know",
        at_least=1,
        shown="the length in the trace",
    )
    has_prefix_caching: bool = True
    front_s: float = setting(
        0.0,
        "server",
        "milliseconds of TTFT and E2E outside the engine: fronts, network",
        name="front_ms",
        scale=1e-3,
        at_least=0,
    )
    timeline_bin_s: float = setting(10.0, above=0, may_be_infinite=True)
    sample_every_steps: int = setting(8, at_least=1)

    def __post_init__(self) -> None:
        check(self)
        _executor_config(self)
        if self.scheduler.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                "{} must be at least {}", "scheduler.max_num_batched_tokens", "max_num_seqs"
            )


def build_engine(
    config: SimulationConfig,
    clock: VirtualClock,
    on_prefill: PrefillWatcher,
    output_length: OutputLength,
) -> Engine:
    """Build the production engine over the simulated executor, both on `clock`."""
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
    """Build the gate of the policy."""
    size = config.batch_size or config.max_num_seqs
    match config.policy:
        case Policy.FCFS | Policy.FAIR:
            return OpenGate()
        case Policy.STATIC:
            return BatchGate(batch_size=size, max_wait_s=math.inf)
        case Policy.DYNAMIC:
            return BatchGate(batch_size=size, max_wait_s=config.batch_wait_s)
