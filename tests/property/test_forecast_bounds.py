"""Forecasts compared with the engine itself, on a clock that the cost model drives.

No first token comes earlier than the forecast for a request alone on the machine. The expected wait
must be of the right magnitude, because clients wait for the time in RetryInfo.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig, SchedulingOrder
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted
from penstock.scheduler.forecast import (
    Demand,
    Forecast,
    MachineModel,
    QueuedAhead,
    RunningLoad,
    forecast,
    prefill_alone_s,
)
from penstock.scheduler.request import RequestSpec
from support.core import simulated_executor

COST = CostModel(step_s=0.01, prefill_token_s=1e-4, decode_slot_s=2e-4, context_token_s=1e-7)
BLOCK_SIZE = 16


@dataclass(slots=True)
class Harness:
    """Runs requests through a first come, first served engine, and records the forecast and the
    measured times of each.
    """

    budget: int
    max_num_seqs: int
    num_blocks: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    specs: dict[int, RequestSpec] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    running: dict[int, int] = field(default_factory=dict)
    reported: dict[int, Forecast] = field(default_factory=dict)
    ttft_s: dict[int, float] = field(default_factory=dict)
    queue_s: dict[int, float] = field(default_factory=dict)

    def engine(self) -> Engine:
        executor = simulated_executor(
            self.clock,
            COST,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_seq_len=2048,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=self.budget,
            admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT,
            order=SchedulingOrder.FCFS,
        )
        return Engine(executor, config, self.clock)

    def blocks_of(self, key: int) -> int:
        return -(-self.specs[key].max_total_tokens // BLOCK_SIZE)

    def submit(self, engine: Engine, num_prompt: int, max_tokens: int) -> None:
        key = len(self.specs) + 1
        spec = RequestSpec(
            key=key,
            request_id=str(key),
            prompt_ids=np.full(num_prompt, 5, dtype=np.int32),
            max_tokens=max_tokens,
            arrival_s=self.clock(),
        )
        self.specs[key] = spec
        machine = MachineModel(cost=COST, max_prefill_tokens=self.budget)
        want = Demand(
            num_prefill_tokens=num_prompt,
            num_blocks=self.blocks_of(key),
            min_output_tokens=max_tokens,
            expected_output_tokens=max_tokens,
        )
        self.reported[key] = forecast(machine, want, self.load(engine), self.ahead())
        self.waiting.add(key)
        engine.submit((spec,))

    def load(self, engine: Engine) -> RunningLoad:
        arrays = engine.arrays
        slots = [request.slot for request in engine.requests.values() if request.slot >= 0]
        computed = arrays.num_computed[slots]
        known = arrays.num_tokens[slots]
        is_prefilling = known - computed > 1
        num_used = sum(map(self.blocks_of, self.running))
        to_go = sum(self.specs[key].max_tokens - done for key, done in self.running.items())
        return RunningLoad(
            num_running=len(slots),
            num_decodes=int(np.sum(~is_prefilling)),
            num_context_tokens=int(computed.sum()),
            num_prefill_tokens=int((known - computed)[is_prefilling].sum()),
            num_output_tokens=float(to_go),
            num_free_slots=self.max_num_seqs - len(slots),
            num_free_blocks=self.num_blocks - num_used,
            num_used_blocks=num_used,
        )

    def ahead(self) -> QueuedAhead:
        return QueuedAhead(
            num_requests=len(self.waiting),
            num_prefill_tokens=sum(self.specs[key].num_prompt_tokens for key in self.waiting),
            num_blocks=sum(map(self.blocks_of, self.waiting)),
            num_output_tokens=float(sum(self.specs[key].max_tokens for key in self.waiting)),
        )

    def step(self, engine: Engine) -> None:
        events = engine.step()
        for change in events.changes:
            if isinstance(change, Admitted):
                self.waiting.discard(change.key)
                self.running[change.key] = 0
                self.queue_s[change.key] = change.at_s - self.specs[change.key].arrival_s
        for key in events.keys.tolist():
            self.running[key] += 1
            self.ttft_s.setdefault(key, self.clock() - self.specs[key].arrival_s)
        for end in events.ends:
            self.running.pop(end.key, None)

    def run(self, arrivals: list[tuple[int, int, int]]) -> None:
        engine = self.engine()
        for num_steps, num_prompt, max_tokens in arrivals:
            for _ in range(num_steps):
                if engine.has_work:
                    self.step(engine)
            self.submit(engine, num_prompt, max_tokens)
        for _ in range(100_000):
            if not engine.has_work:
                break
            self.step(engine)
        assert len(self.ttft_s) == len(arrivals)


arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=60)
@given(
    arrivals=arrivals,
    budget=st.integers(16, 512),
    max_num_seqs=st.integers(1, 8),
    num_blocks=st.integers(28, 200),
)
def test_no_request_is_faster_than_alone(
    arrivals: list[tuple[int, int, int]], budget: int, max_num_seqs: int, num_blocks: int
) -> None:
    harness = Harness(budget=budget, max_num_seqs=max_num_seqs, num_blocks=num_blocks)

    harness.run(arrivals)

    for key in harness.reported:
        want = Demand(num_prefill_tokens=harness.specs[key].num_prompt_tokens)
        machine = MachineModel(cost=COST, max_prefill_tokens=budget)
        assert prefill_alone_s(machine, want) <= harness.ttft_s[key] + 1e-9


@pytest.mark.parametrize(
    ("max_num_seqs", "num_blocks"), [(8, 10_000), (64, 160)], ids=["slots", "blocks"]
)
def test_the_expected_wait_is_of_the_right_size(max_num_seqs: int, num_blocks: int) -> None:
    random = np.random.default_rng(4)
    harness = Harness(budget=256, max_num_seqs=max_num_seqs, num_blocks=num_blocks)

    harness.run(
        [
            (int(random.integers(0, 4)), int(random.integers(20, 400)), int(random.integers(8, 64)))
            for _ in range(200)
        ]
    )

    reported = np.array([harness.reported[key].queue_s for key in harness.specs])
    real = np.array([harness.queue_s[key] for key in harness.specs])
    is_long = real > 1.0
    assert is_long.sum() > 50, "nobody had to wait"
    assert 0.8 < np.median(reported[is_long] / real[is_long]) < 1.25
    assert np.corrcoef(reported, real)[0, 1] > 0.9
