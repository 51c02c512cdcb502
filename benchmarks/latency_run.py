"""Runs the production engine on one simulated machine, and records every step's time and limits.

Contains the run and the figures computed from it, but not the goals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.batch import Batch
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import StepMeasure
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import RequestSpec
from simulated_machines import Machine, MachineExecutor

MAX_NUM_SEQS = 256
WARM_UP_SHARE = 0.1
"""Share of the run that is not measured, because the fit starts without measurements."""
END_SHARE = 0.1
_NUM_BLOCKS = 65_536
_MAX_SEQ_LEN = 8192
_MAX_PROMPT_TOKENS = 4096
_MIN_PROMPT_TOKENS = 256
_NUM_BACKLOG = 8
_SEED = 11
_EXECUTOR = ExecutorConfig(
    kind=ExecutorKind.SIMULATED,
    num_blocks=_NUM_BLOCKS,
    max_num_seqs=MAX_NUM_SEQS,
    max_seq_len=_MAX_SEQ_LEN,
    pipeline_depth=1,
    simulated=SimulatedConfig(vocab_size=1000),
)


class _Traffic:
    """The requests of a run. As many requests decode as the machine's load has at the time, and
    `_NUM_BACKLOG` prompts wait for prefill or are in prefill.
    """

    def __init__(self, machine: Machine, engine: Engine) -> None:
        self._load = machine.load
        self._engine = engine
        self._random = np.random.default_rng(_SEED)
        self._tokens: NDArray[np.int32] = self._random.integers(
            0, 1000, _MAX_PROMPT_TOKENS, dtype=np.int32
        )
        self._next_key = 1
        self._decoding: list[int] = []
        self._prompts: set[int] = set()
        self._last_s: dict[int, float] = {}

    def match_load(self, share: float) -> None:
        """Submit and cancel requests to match the load at this share of the run (0 to 1)."""
        wanted = self._load.wanted(share)
        while len(self._decoding) > wanted:
            self._engine.cancel(self._decoding.pop())
        num_missing = wanted - len(self._decoding)
        for number in range(num_missing):
            num_output = self._num_output(number / num_missing)
            self._decoding.append(self._spec(self._load.num_prompt_tokens, num_output, 1).key)
        while len(self._prompts) < _NUM_BACKLOG:
            num_tokens = int(self._random.integers(_MIN_PROMPT_TOKENS, _MAX_PROMPT_TOKENS))
            self._prompts.add(self._spec(num_tokens, 1, 0).key)

    def _num_output(self, age: float) -> int:
        """Return the output length of a new request.

        It is random if the load's lengths vary. Otherwise it is the load's length, shortened by the
        fraction `age`, so that requests that start together do not end together.
        """
        num_tokens = self._load.num_output_tokens
        if self._load.is_varied:
            return int(self._random.integers(1, 2 * num_tokens))
        return num_tokens - int(num_tokens * age)

    def _spec(self, num_prompt: int, max_tokens: int, priority: int) -> RequestSpec:
        spec = RequestSpec(
            key=self._next_key,
            request_id=str(self._next_key),
            prompt_ids=self._tokens[:num_prompt],
            max_tokens=max_tokens,
            priority=priority,
        )
        self._next_key += 1
        self._engine.submit((spec,))
        return spec

    def note(self, events: StepEvents) -> list[float]:
        """Record a step; return the times between tokens of its decodes, seconds."""
        keys = [key for key in events.keys.tolist() if key not in self._prompts]
        now = events.at_s
        itl_s = [now - self._last_s[key] for key in keys if key in self._last_s]
        self._last_s.update(dict.fromkeys(keys, now))
        for end in events.ends:
            self._last_s.pop(end.key, None)
            self._prompts.discard(end.key)
            if end.key in self._decoding:
                self._decoding.remove(end.key)
        return itl_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """The steps of one run, in arrays [n] with one entry per step, and the times between tokens, in
    arrays [m].

    `at_s`: when the step ended; `budget`, `limit`: the prefill budget, tokens, and the maximum
    number of running requests, after the step; `is_trusted`: whether the engine trusted its fitted
    cost model. `itl_s`: the time before each token except a request's first; `itl_at_s`: when the
    token was generated.
    """

    duration_s: float
    at_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    num_prefill: NDArray[np.int64]
    num_decodes: NDArray[np.int64]
    budget: NDArray[np.int64]
    limit: NDArray[np.int64]
    is_trusted: NDArray[np.bool_]
    itl_s: NDArray[np.float64]
    itl_at_s: NDArray[np.float64]

    def within(self, start: float, end: float = 1.0) -> NDArray[np.bool_]:
        """Return for each step whether it ended between these shares of the run, bool [n]."""
        return (self.at_s >= start * self.duration_s) & (self.at_s <= end * self.duration_s)

    def itl_percentile_s(self, percent: float) -> float:
        """Return a percentile of the decoding requests' ITL, seconds, without the warm-up."""
        is_counted = self.itl_at_s >= WARM_UP_SHARE * self.duration_s
        return float(np.percentile(self.itl_s[is_counted], percent))

    def share_over(self, target_s: float) -> float:
        """Return the share of steps with decodes, after the warm-up, that took longer than the
        target.
        """
        is_counted = self.within(WARM_UP_SHARE) & (self.num_decodes > 0)
        return float((self.step_s[is_counted] > target_s).mean())

    @property
    def prefill_per_s(self) -> float:
        """Prefill tokens per second, without the warm-up."""
        is_counted = self.within(WARM_UP_SHARE)
        return float(self.num_prefill[is_counted].sum() / self.step_s[is_counted].sum())


def direction_changes(values: NDArray[np.int64]) -> int:
    """Count the direction changes of a sequence; equal neighbours are ignored."""
    moves = np.sign(np.diff(values))
    directions = moves[moves != 0].tolist()
    return sum(before != after for before, after in pairwise(directions))


class _Steps:
    """A listener of the engine (`EngineListener`) that records the content and the duration of each
    step.
    """

    def __init__(self) -> None:
        self.measures: list[StepMeasure] = []
        self._ended_s = 0.0

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Do nothing: only steps are recorded."""

    def note_launch(self, batch: Batch, chunks: Sequence[PrefillChunk], launched_s: float) -> None:
        """Do nothing: a step is recorded when it ends."""

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        """Record the step, if there was one."""
        del events
        if note is not None:
            begun_s = max(note.begun_s, self._ended_s)
            self._ended_s = note.collected_s
            self.measures.append(
                StepMeasure(
                    num_prefill_tokens=note.num_prefill_tokens,
                    num_decodes=note.batch.num_decodes,
                    num_context_tokens=note.num_context_tokens,
                    seconds=note.collected_s - begun_s,
                )
            )


def _ignore_prefill(keys: NDArray[np.int64], num_tokens: NDArray[np.int32]) -> None:
    del keys, num_tokens


def run_machine(machine: Machine, config: SchedulerConfig, duration_s: float) -> Run:
    """Run the engine on the machine for `duration_s` seconds of virtual time; return its steps."""
    clock = VirtualClock()
    steps = _Steps()
    measures = steps.measures
    executor = MachineExecutor(machine, duration_s, _EXECUTOR, clock, _ignore_prefill)
    engine = Engine(executor, config, clock, steps)
    traffic = _Traffic(machine, engine)
    sizing = engine.sizing
    at_s: list[float] = []
    limits: list[tuple[int, int, bool]] = []
    itl_s: list[float] = []
    itl_at_s: list[float] = []
    while clock() < duration_s:
        traffic.match_load(clock() / duration_s)
        events = engine.step()
        latencies_s = traffic.note(events)
        itl_s += latencies_s
        itl_at_s += [events.at_s] * len(latencies_s)
        if len(measures) > len(at_s):
            at_s.append(clock())
            limits.append(
                (sizing.prefill_budget_tokens, sizing.max_num_running, sizing.fit.is_trusted)
            )
    engine.check_integrity()
    engine.close()
    return Run(
        duration_s=duration_s,
        at_s=np.array(at_s),
        step_s=np.array([measure.seconds for measure in measures]),
        num_prefill=np.array([measure.num_prefill_tokens for measure in measures]),
        num_decodes=np.array([measure.num_decodes for measure in measures]),
        budget=np.array([budget for budget, _, _ in limits]),
        limit=np.array([limit for _, limit, _ in limits]),
        is_trusted=np.array([is_trusted for _, _, is_trusted in limits]),
        itl_s=np.array(itl_s),
        itl_at_s=np.array(itl_at_s),
    )
