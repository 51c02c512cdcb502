"""Defines the simulated machines of `latency_target.py` with their loads, and an executor with the
step times of a machine.

Each machine has a load of requests, and true step times that the fitted cost model must learn.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.executor.config import ExecutorConfig
from penstock.executor.simulated.clock import WaitableClock
from penstock.scheduler.batch import Batch
from penstock.scheduler.cost_model import CostModel, StepMeasure, measure_of
from penstock.tools.simulation.watched_executor import OutputLength, PrefillWatcher, WatchedExecutor

COST = CostModel()
TARGET_S = 0.040
_TILE_TOKENS = 128
_CONVEX_TOKEN_S = 15e-6
_CONVEX_DOUBLE_TOKENS = 4096
"""Length of a chunk, in tokens, that costs twice as much per token as a very short one."""
_NOISE = 0.10
_PAUSE_SHARE = 1 / 400
_PAUSE_S = 0.1
_SLOW_FROM, _SLOW_TO, _SLOW_FACTOR = 0.5, 0.75, 2.0
_ERRATIC_FROM, _ERRATIC_SPREAD = 0.5, 1.0
_SEED = 11

TrueTime = Callable[[StepMeasure, float, np.random.Generator], float]
"""Returns the duration of a step, seconds.

Arguments: the step's content (`seconds` is not set), the elapsed share of the run, a random
generator.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that decode, and an endless queue of prompts with one output token each.

    `num_decoding`: pairs of a start, as a share of the run, and the number of requests that decode
    from then on. Each decodes `num_output_tokens` tokens and is then replaced; surplus requests are
    cancelled. `is_varied`: lengths are uniform, at least 1 and below twice `num_output_tokens`.
    """

    num_decoding: tuple[tuple[float, int], ...] = ((0.0, 64),)
    num_prompt_tokens: int = 512
    num_output_tokens: int = 512
    is_varied: bool = False

    def wanted(self, share: float) -> int:
        """Return the number of requests that decode at this share of the run."""
        return [count for start, count in self.num_decoding if start <= share][-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A simulated machine and its load.

    Attributes:
        steady: Parts of the run, as (from, to) shares, in which machine and load are constant and
            have been for a while.
        is_noisy: Equal steps take different times.
        is_changing: Machine or load changes during the run.
        is_crowded: The load has more decoding requests than the target allows.
        is_erratic: No cost model predicts the steps at the end.
    """

    name: str
    true_s: TrueTime
    target_s: float = TARGET_S
    load: Load = Load()
    steady: tuple[tuple[float, float], ...] = ((0.5, 1.0),)
    is_noisy: bool = False
    is_changing: bool = False
    is_crowded: bool = False
    is_erratic: bool = False

    @property
    def most_decoding(self) -> float:
        """The number of requests that can decode within the ITL target if there is no prefill,
        computed from the true costs; at most the number that the load has at the end.

        With varied lengths, long outputs are over-represented among running requests: their mean
        age is the mean square of the lengths divided by twice the mean.
        """
        load = self.load
        mean_age = load.num_output_tokens * (2 / 3 if load.is_varied else 1 / 2)
        each_s = COST.decode_slot_s + (load.num_prompt_tokens + mean_age) * COST.context_token_s
        return min((self.target_s - COST.step_s) / each_s, load.wanted(1.0))


class MachineExecutor(WatchedExecutor):
    """The executor of the simulation with the step times of a simulated machine, for a run of
    `duration_s` seconds of virtual time.
    """

    def __init__(
        self,
        machine: Machine,
        duration_s: float,
        config: ExecutorConfig,
        clock: WaitableClock,
        on_prefill: PrefillWatcher,
        output_length: OutputLength | None = None,
    ) -> None:
        super().__init__(config, clock, on_prefill, output_length)
        self._machine = machine
        self._duration_s = duration_s
        self._now = clock
        self._random = np.random.default_rng(_SEED)

    def _cost_s(self, batch: Batch) -> float:
        share = self._now() / self._duration_s
        return self._machine.true_s(measure_of(batch, 0.0), share, self._random)


def step_time_of(cost: CostModel) -> TrueTime:
    """Return the step time of a cost model."""

    def step_time_s(work: StepMeasure, share: float, random: np.random.Generator) -> float:
        del share, random
        return cost.step_time_s(
            num_prefill_tokens=work.num_prefill_tokens,
            num_decodes=work.num_decodes,
            num_context_tokens=work.num_context_tokens,
        )

    return step_time_s


linear_s = step_time_of(COST)


def noisy_s(work: StepMeasure, share: float, random: np.random.Generator) -> float:
    """Return the step time of that model with lognormal noise (sigma 0.1) and occasional pauses."""
    factor = float(random.lognormal(0.0, _NOISE))
    pause_s = _PAUSE_S if random.random() < _PAUSE_SHARE else 0.0
    return linear_s(work, share, random) * factor + pause_s


def convex_s(work: StepMeasure, share: float, random: np.random.Generator) -> float:
    """Return the step time of a machine on which the cost per prefill token grows with their
    number.
    """
    num_tokens = work.num_prefill_tokens
    prefill_s = _CONVEX_TOKEN_S * num_tokens * (1.0 + num_tokens / _CONVEX_DOUBLE_TOKENS)
    linear_prefill_s = COST.prefill_token_s * num_tokens
    return linear_s(work, share, random) - linear_prefill_s + prefill_s


def stairs_s(work: StepMeasure, share: float, random: np.random.Generator) -> float:
    """Return the step time of a machine that pads prefill and decode rows to whole tiles."""
    num_rows = work.num_prefill_tokens + work.num_decodes
    num_padding = -num_rows % _TILE_TOKENS
    return linear_s(work, share, random) + COST.prefill_token_s * num_padding


def slower_s(work: StepMeasure, share: float, random: np.random.Generator) -> float:
    """Return the step time of the linear cost model, doubled during a part of the run."""
    factor = _SLOW_FACTOR if _SLOW_FROM <= share < _SLOW_TO else 1.0
    return factor * linear_s(work, share, random)


def erratic_s(work: StepMeasure, share: float, random: np.random.Generator) -> float:
    """Return the step time of the linear cost model in the first part of the run, and then a random
    time that does not depend on the step's content.
    """
    if share < _ERRATIC_FROM:
        return linear_s(work, share, random)
    return TARGET_S * float(random.lognormal(0.0, _ERRATIC_SPREAD))


_CROWD = Load(num_decoding=((0.0, 256),), num_prompt_tokens=128, num_output_tokens=2048)

MACHINES = (
    Machine(name="linear", true_s=linear_s),
    Machine(name="noisy", true_s=noisy_s, is_noisy=True),
    Machine(name="convex", true_s=convex_s),
    Machine(name="stairs", true_s=stairs_s),
    Machine(
        name="slower",
        true_s=slower_s,
        steady=((0.25, 0.5), (0.625, 0.75), (0.875, 1.0)),
        is_changing=True,
    ),
    Machine(
        name="load",
        true_s=linear_s,
        load=Load(num_decoding=((0.0, 32), (1 / 3, 200), (2 / 3, 32))),
        steady=((1 / 6, 1 / 3), (1 / 2, 2 / 3), (5 / 6, 1.0)),
        is_changing=True,
    ),
    Machine(
        name="crowded",
        true_s=linear_s,
        target_s=0.016,
        load=replace(_CROWD, is_varied=True),
        is_crowded=True,
    ),
    # Requests that start together age and end together.
    Machine(name="cohorts", true_s=linear_s, target_s=0.016, load=_CROWD, is_crowded=True),
    Machine(name="erratic", true_s=erratic_s, is_noisy=True, is_erratic=True),
)
