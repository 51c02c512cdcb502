"""The scheduler over an executor that returns any number of results in any order at any time.

Every request ends once and gets its own tokens in order, and no invariant is violated between two
steps. The executor never has more than it can run.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from penstock.scheduler.config import AdmissionPolicy
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from support.core import make_spec
from support.examples import fewer_examples
from support.self_paced import SelfPacedExecutor, make_self_paced, token_of

BUDGET = 12
MAX_NUM_SEQS = 4
NUM_BLOCKS = 14


class SelfPacedMachine(RuleBasedStateMachine):
    engine: Engine
    executor: SelfPacedExecutor

    @initialize(policy=st.sampled_from(AdmissionPolicy))
    def build(self, policy: AdmissionPolicy) -> None:
        self.engine, self.executor = make_self_paced(
            budget=BUDGET,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=MAX_NUM_SEQS,
            admission_policy=policy,
            watermark=0.0,
        )
        self.specs: dict[int, RequestSpec] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Completed | Failed] = {}
        self.failed: set[int] = set()
        self.stopped: set[int] = set()
        self.cancelled: set[int] = set()

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        prefix=st.sampled_from([0, 8]),
        priority=st.integers(-1, 1),
    )
    def submit(self, length: int, max_tokens: int, prefix: int, priority: int) -> None:
        key = len(self.specs) + 1
        prompt = [*range(prefix), *range(key * 100, key * 100 + length)]
        spec = make_spec(key, prompt, max_tokens=max_tokens, priority=priority)
        self.specs[key], self.tokens[key] = spec, []
        self.engine.submit((spec,))

    @rule(count=st.integers(1, 25), data=st.data())
    @precondition(lambda self: self.executor.in_engine)
    def emit(self, count: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.executor.in_engine)))
        if key not in self.failed | self.stopped:
            self.executor.emit(key, count)

    @rule(data=st.data())
    @precondition(lambda self: self.executor.in_engine)
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.executor.in_engine)))
        if key not in self.failed | self.stopped:
            self.failed.add(key)
            self.executor.fail(key)

    @rule(data=st.data())
    @precondition(lambda self: self.executor.in_engine)
    def stop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.executor.in_engine)))
        if key not in self.failed | self.stopped:
            self.stopped.add(key)
            self.executor.end(key, reason=FinishReason.STOP)

    @rule(data=st.data())
    @precondition(lambda self: self.specs)
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.specs)))
        if self.engine.cancel(key):
            self.cancelled.add(key)

    @rule()
    def step(self) -> None:
        events = self.engine.step()
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            assert key not in self.ends
            self.tokens[key].append(token)
        for end in events.ends:
            assert end.key not in self.ends
            self.ends[end.key] = end
            self.check_end(end)

    def check_end(self, end: Completed | Failed) -> None:
        key = end.key
        match end:
            case Failed(reason=FailureReason.EXECUTOR_REQUEST_FAILED):
                assert key in self.failed
            case Failed():
                assert not self.tokens[key]
                assert end.reason in (
                    FailureReason.EXCEEDS_KV_CACHE,
                    FailureReason.PROMPT_TOO_LONG,
                )
            case Completed(reason=FinishReason.CANCELLED):
                assert key in self.cancelled
            case Completed(reason=FinishReason.STOP):
                assert key in self.stopped
            case _:
                assert len(self.tokens[key]) == self.specs[key].max_tokens

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    @invariant()
    def no_request_gets_tokens_of_another(self) -> None:
        for key, tokens in getattr(self, "tokens", {}).items():
            spec = self.specs[key]
            first = spec.num_prompt_tokens
            assert tokens == [token_of(spec.request_id, first + i) for i in range(len(tokens))]

    @invariant()
    def the_executor_holds_only_what_it_can_run(self) -> None:
        if not getattr(self, "executor", None) or not self.executor.batches:
            return
        batch = self.executor.batches[-1]
        assert len(self.executor.in_engine) <= MAX_NUM_SEQS
        assert batch.num_used_blocks <= NUM_BLOCKS
        chunks = batch.num_tokens[batch.num_decodes :]
        # At most the budgets of two steps: the one that runs and the next one.
        assert len(chunks) <= 1 or int(chunks.sum()) <= 2 * BUDGET

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(500):
            if not self.engine.has_work:
                break
            for key in sorted(self.executor.in_engine):
                if key not in self.failed | self.stopped:
                    self.executor.emit(key)
            self.step()
            self.books_balance()
        assert not self.engine.has_work
        assert set(self.ends) == set(self.specs)
        assert self.executor.in_engine == {}
        assert self.engine.cache.pool.num_used == 0
        self.engine.close()


TestSelfPaced = SelfPacedMachine.TestCase
TestSelfPaced.settings = settings(fewer_examples(15), stateful_step_count=40)
