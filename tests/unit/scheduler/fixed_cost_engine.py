"""An engine on a simulated executor in virtual time. The engine is given the executor's exact cost
coefficients.

The engine's events are recorded per request. The tests check them.
"""

from __future__ import annotations

from typing import Any

from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Failed, Queued, StepEvents
from penstock.scheduler.request import Request, RequestSpec
from support.core import make_spec, simulated_executor

# A step takes 10 ms and 1 ms for each token of prefill: a prompt of 100 alone takes 110 ms.
COST = CostModel(step_s=0.01, prefill_token_s=0.001, decode_slot_s=0.0, context_token_s=0.0)
BUDGET = 100
# Large, so that a check after every step looks at few.
BLOCK_SIZE = 20
NUM_SETTLING = 40
MAX_STEPS = 3000


class FixedCostEngine:
    """An engine, and the queue positions, admissions and ends of its requests.

    Deadlines and time limits of requests are given relative to the current time. All prompts are
    prefixes of one token sequence. `is_settled`: observed steps have confirmed the cost
    coefficients. Unless `min_deadline_chance` is given, the predicted output length is
    `min_tokens`.
    """

    def __init__(self, *, is_settled: bool = True, num_seqs: int = 4, **config: Any) -> None:
        self.clock = VirtualClock(0.0)
        executor = simulated_executor(
            self.clock, COST, max_num_seqs=num_seqs, block_size=BLOCK_SIZE, num_blocks=200
        )
        settings: dict[str, Any] = {
            "max_num_batched_tokens": BUDGET,
            "known_cost": COST,
            "max_prefill_share": 1.0,
            "min_deadline_chance": 0.0,
        }
        self.engine = Engine(executor, SchedulerConfig(**(settings | config)), self.clock)
        self.ends: dict[int, Completed | Failed] = {}
        self.queued: dict[int, list[Queued]] = {}
        self.admitted: dict[int, Admitted] = {}
        if is_settled:
            # Until some steps of each kind were as predicted, some error is allowed for.
            for counts in NUM_SETTLING * [(10, 0, 10), (0, 1, 12)]:
                names = ("num_prefill_tokens", "num_decodes", "num_context_tokens")
                step = dict(zip(names, counts, strict=True))
                self.engine.sizing.fit.observe(COST.step_time_s(**step), **step)
            self.submit(1_000_000, 1)
            self.run()

    def spec(self, key: int, num_prompt: int, **options: Any) -> RequestSpec:
        now = self.clock()
        for name in ("ttft_deadline_s", "deadline_s", "time_limit_s"):
            if name in options:
                options[name] += now
        options = {"max_tokens": 5, "arrival_s": now, "hashed": False} | options
        options["block_size"] = BLOCK_SIZE
        return make_spec(key, [i % 90 for i in range(num_prompt)], **options)

    def request(self, key: int, num_prompt: int, **options: Any) -> Request:
        """Return a `Request` of the scheduler without submitting it."""
        spec = self.spec(key, num_prompt, **options)
        return Request(
            spec=spec, sequence=key, tokens=spec.prompt_ids, block_hashes=list(spec.block_hashes)
        )

    def submit(self, key: int, num_prompt: int, **options: Any) -> Request | None:
        """Submit a request; return the engine's request, or None if it was rejected."""
        self.engine.submit((self.spec(key, num_prompt, **options),))
        return self.engine.requests.get(key)

    def step(self) -> StepEvents:
        events = self.engine.step()
        self.engine.check_integrity()
        for end in events.ends:
            self.ends[end.key] = end
        for change in events.changes:
            if isinstance(change, Queued):
                self.queued.setdefault(change.key, []).append(change)
            elif isinstance(change, Admitted):
                self.admitted[change.key] = change
        return events

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def failure(self, key: int) -> Failed:
        end = self.ends[key]
        assert isinstance(end, Failed)
        return end

    def run_until(self, at_s: float) -> None:
        """Run steps until the clock reaches `at_s`, in seconds."""
        while self.clock() < at_s:
            assert self.engine.has_work
            self.step()
