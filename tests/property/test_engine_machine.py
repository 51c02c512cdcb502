"""Whatever happens to requests, in whatever order: the engine over a strict simulated device.

Hypothesis plays clients, time and faults; after every step the invariants of the core hold, the
device finds every key and value where it looks for it, and what each request was told fits the
reference generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.simulated.pace import VirtualClock
from penstock.executor.simulated.tokens import simulated_output
from penstock.scheduler.batch import Batch
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Failed, Finished, Preempted, StepEvents
from penstock.scheduler.request import (
    NO_TIME,
    FailureReason,
    FinishReason,
    RequestSpec,
    SamplingParams,
)

VOCAB = 50
MAX_SEQ_LEN = 32
MAX_NUM_SEQS = 4
MAX_WAITING = 12
STOP_IDS = (3, 4)
MAX_DRAIN_STEPS = 3000
# Prompts are prefixes of these and a tail, so that many share blocks.
STEMS = ((10, 11, 12, 13, 14, 15, 16, 17, 18, 19), (10, 11, 12, 13, 20, 21, 22, 23, 24, 25))


class BudgetedExecutor(SimulatedExecutor):
    """A strict device that also holds the scheduler to its token budget."""

    max_num_batched_tokens = 0

    def launch(self, batch: Batch) -> None:
        assert batch.num_rows or batch.released
        assert int(batch.num_tokens.sum()) <= self.max_num_batched_tokens
        assert (batch.num_tokens > 0).all()
        super().launch(batch)


@dataclass(slots=True)
class Told:
    """What a client was told about one output."""

    spec: RequestSpec
    reference: NDArray[np.int32]
    sequence: int
    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None
    is_running: bool = False
    num_admissions: int = 0
    cancelled_as: FinishReason | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is more senior."""
        return (-self.spec.priority, self.sequence)


@st.composite
def fault_scripts(draw: st.DrawFn, *, depth: int) -> tuple[Fault, ...]:
    kinds = [FaultKind.REQUEST_FAILS]
    if depth == 1:
        kinds += [FaultKind.NO_TOKENS, FaultKind.EXTRA_TOKENS]
    return tuple(
        draw(
            st.lists(
                st.builds(
                    Fault,
                    kind=st.sampled_from(kinds),
                    at_step=st.integers(1, 30),
                    at_output=st.none() | st.integers(0, 4),
                    at_request=st.none() | st.integers(1, 6),
                    max_times=st.integers(1, 3),
                    num_extra=st.integers(1, 3),
                ),
                max_size=3,
            )
        )
    )


class EngineMachine(RuleBasedStateMachine):
    """Clients, clock and faults against one engine."""

    live = Bundle("live")

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        depth = data.draw(st.sampled_from([1, 2]), label="depth")
        self.faults = data.draw(fault_scripts(depth=depth), label="faults")
        self.block_size = data.draw(st.sampled_from([1, 2, 4]), label="block_size")
        pool_tokens = data.draw(st.integers(16, 48), label="pool_tokens")
        num_blocks = -(-pool_tokens // self.block_size)
        self.simulated = SimulatedConfig(
            vocab_size=VOCAB,
            is_strict=True,
            min_output_tokens=2,
            max_output_tokens=14,
            cost=CostModel(step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0),
            faults=self.faults,
        )
        self.clock = VirtualClock(1.0)
        executor = BudgetedExecutor(
            ExecutorConfig(
                kind=ExecutorKind.SIMULATED,
                block_size=self.block_size,
                num_blocks=num_blocks,
                max_num_seqs=MAX_NUM_SEQS,
                max_seq_len=MAX_SEQ_LEN,
                pipeline_depth=depth,
                simulated=self.simulated,
            ),
            pacer=self.clock,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=data.draw(st.integers(MAX_NUM_SEQS, 24), label="budget"),
            admission_policy=data.draw(st.sampled_from(AdmissionPolicy), label="policy"),
            watermark=data.draw(st.sampled_from([0.0, 0.1, 0.3]), label="watermark"),
            max_num_waiting=MAX_WAITING,
        )
        executor.max_num_batched_tokens = config.max_num_batched_tokens
        self.num_blocks = num_blocks
        self.engine = Engine(executor, config, self.clock)
        self.told: dict[int, Told] = {}
        self.history: list[Told] = []
        self.num_submitted = 0

    @rule(
        target=live,
        stem=st.sampled_from(STEMS),
        stem_length=st.sampled_from([0, 5, 8, 10]),
        tail=st.lists(st.integers(5, VOCAB - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        num_outputs=st.integers(1, 3),
        salt=st.sampled_from([b"one", b"one", b"", b"two"]),
        priority=st.integers(-1, 1),
        patience_s=st.tuples(*[st.sampled_from([*[NO_TIME] * 6, 0.0, 3.0, 10.0])] * 3),
        num_replayed=st.integers(0, 3),
        has_stops=st.booleans(),
        is_key_reused=st.booleans(),
    )
    def submit(
        self,
        stem: tuple[int, ...],
        stem_length: int,
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        num_outputs: int,
        salt: bytes,
        priority: int,
        patience_s: tuple[float, float, float],
        num_replayed: int,
        has_stops: bool,
        is_key_reused: bool,
    ) -> object:
        prompt = np.array([*stem[:stem_length], *tail], dtype=np.int32)
        now = self.clock()
        self.num_submitted += 1
        first_key = self.ended_key() if is_key_reused else self.num_submitted * 10
        specs: list[RequestSpec] = []
        for index in range(num_outputs):
            spec = RequestSpec(
                key=first_key + index,
                request_id=f"request-{self.num_submitted}",
                prompt_ids=prompt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_ids=STOP_IDS if has_stops else (),
                sampling=SamplingParams(temperature=0.5, seed=index),
                hash_salt=salt,
                block_hashes=self.digests(prompt, salt),
                leader_key=first_key if index else 0,
                output_index=index,
                priority=priority,
                arrival_s=now,
                ttft_deadline_s=now + patience_s[0],
                deadline_s=now + patience_s[1],
                time_limit_s=now + patience_s[2],
            )
            specs.append(self.replayed(spec, num_replayed) if num_outputs == 1 else spec)
        for spec in specs:
            reference = simulated_output(spec, VOCAB, self.simulated)
            told = Told(spec, reference[spec.num_replayed :], len(self.history))
            self.told[spec.key] = told
            self.history.append(told)
        self.engine.submit(tuple(specs))
        return multiple(*(spec.key for spec in specs))

    def ended_key(self) -> int:
        """The first key of a request whose outputs have all ended, or a fresh one."""
        live = {key // 10 for key, told in self.told.items() if told.end is None}
        ended = {key // 10 for key in self.told} - live
        return 10 * min(ended, default=self.num_submitted)

    def digests(self, tokens: NDArray[np.int32], salt: bytes) -> tuple[bytes, ...]:
        return hash_blocks(tokens, self.block_size, chain_root(salt)) if salt else ()

    def replayed(self, spec: RequestSpec, num_replayed: int) -> RequestSpec:
        """The same request in a later life, after `num_replayed` tokens of its output."""
        output = simulated_output(spec, VOCAB, self.simulated)
        count = min(num_replayed, len(output) - 1)
        tokens = np.concatenate((spec.prompt_ids, output[:count]))
        return RequestSpec(
            key=spec.key,
            request_id=spec.request_id,
            prompt_ids=tokens,
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            num_replayed=count,
            stop_ids=spec.stop_ids,
            sampling=spec.sampling,
            hash_salt=spec.hash_salt,
            block_hashes=self.digests(tokens, spec.hash_salt),
            priority=spec.priority,
            arrival_s=spec.arrival_s,
            ttft_deadline_s=spec.ttft_deadline_s,
            deadline_s=spec.deadline_s,
            time_limit_s=spec.time_limit_s,
        )

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def turn(self) -> None:
        before_s = self.clock()
        events = self.engine.step()
        self.engine.check_integrity()
        self.check_order(events)
        self.take(events)
        for told in self.told.values():
            if told.end is None:
                spec = told.spec
                ttft_s = NO_TIME if told.tokens else spec.ttft_deadline_s
                assert before_s < min(spec.deadline_s, spec.time_limit_s, ttft_s)

    @rule(key=consumes(live), reason=st.sampled_from([*FinishReason, None]))
    def cancel(self, key: int, reason: FinishReason | None) -> None:
        """One output for a reason, or without one all outputs by the request's id."""
        if reason is None:
            self.cancel_by_id(self.told[key].spec.request_id)
            return
        told = self.told[key]
        was_cancelled = self.engine.cancel(key, reason)
        if told.end is not None:
            assert not was_cancelled
        if was_cancelled:
            assert told.cancelled_as is None
            told.cancelled_as = reason
            assert not self.engine.cancel(key, reason)

    def cancel_by_id(self, request_id: str) -> None:
        was_cancelled = self.engine.cancel_by_id(request_id)
        assert not self.engine.cancel_by_id(request_id)
        for told in self.told.values():
            if told.spec.request_id == request_id and told.end is None and was_cancelled:
                told.cancelled_as = told.cancelled_as or FinishReason.CANCELLED

    @rule(key=live)
    def submit_a_live_id_again(self, key: int) -> None:
        told = self.told[key]
        if key not in self.engine.scheduler.life.requests:
            return
        self.engine.submit((told.spec,))
        refusals = [end for end in self.engine.scheduler.life.ends if end.key == key]
        assert [end.reason for end in refusals] == [FailureReason.REQUEST_ID_IN_USE]
        self.engine.scheduler.life.ends.remove(refusals[0])

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(float(seconds))

    @invariant()
    def account_adds_up(self) -> None:
        self.engine.check_integrity()

    def check_order(self, events: StepEvents) -> None:
        """Nobody is admitted before a senior who may run, nor preempted before a junior."""
        ended = {end.key for end in events.ends}
        live = {k: told for k, told in self.told.items() if told.end is None and k not in ended}
        running = {key for key, told in live.items() if told.is_running}
        preempted = {change.key for change in events.changes if isinstance(change, Preempted)}
        for change in events.changes:
            rank = self.told[change.key].rank
            if isinstance(change, Preempted):
                assert all(live[key].rank < rank for key in running - preempted)
            else:
                assert not preempted
                # Outputs after the first may wait for their leader.
                waiting = [told for key, told in live.items() if key not in running]
                assert all(told.rank >= rank for told in waiting if not told.spec.leader_key)
                running.add(change.key)

    def take(self, events: StepEvents) -> None:
        for change in events.changes:
            told = self.told[change.key]
            assert told.end is None
            assert told.is_running is not isinstance(change, Admitted)
            told.is_running = not told.is_running
            told.num_admissions += told.is_running
        assert len(events.keys) == len(events.tokens)
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            told = self.told[key]
            assert told.end is None
            assert told.num_admissions > 0
            told.tokens.append(token)
            count = len(told.tokens)
            assert told.tokens == told.reference[:count].tolist()
        for end in events.ends:
            told = self.told[end.key]
            assert told.end is None
            told.end = end
            if isinstance(end, Finished):
                self.check_finish(told, end)
            else:
                self.check_failure(told, end)

    def check_finish(self, told: Told, end: Finished) -> None:
        is_stopped = told.reference[-1] in told.spec.stop_ids
        if told.cancelled_as is not None:
            assert end.reason is told.cancelled_as
        elif end.reason is FinishReason.TIME_LIMIT:
            assert self.clock() >= told.spec.time_limit_s
        else:
            assert len(told.tokens) == len(told.reference)
            expected = FinishReason.STOP if is_stopped else FinishReason.LENGTH
            assert end.reason is expected
            assert end.stop_id == (STOP_IDS[0] if is_stopped else -1)

    def check_failure(self, told: Told, end: Failed) -> None:
        spec, now = told.spec, self.clock()
        needed_blocks = -(-(spec.max_total_tokens - 1) // self.block_size)
        match end.reason:
            case FailureReason.PROMPT_TOO_LONG:
                assert spec.max_total_tokens > MAX_SEQ_LEN
            case FailureReason.EXCEEDS_KV_CACHE:
                assert needed_blocks > self.num_blocks
            case FailureReason.DEADLINE_EXCEEDED:
                assert now >= spec.deadline_s
            case FailureReason.TTFT_DEADLINE_EXCEEDED:
                assert now >= spec.ttft_deadline_s
                assert not told.tokens
            case FailureReason.EXECUTOR_REQUEST_FAILED:
                assert any(fault.kind is FaultKind.REQUEST_FAILS for fault in self.faults)
            case FailureReason.QUEUE_FULL:
                assert told.num_admissions == 0
            case _:
                raise AssertionError(f"{end.reason.name} was never caused")

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(MAX_DRAIN_STEPS):
            if not self.engine.has_work:
                break
            self.turn()
        assert not self.engine.has_work
        assert all(told.end is not None for told in self.history)
        assert self.engine.scheduler.life.cache.pool.num_used == 0
        assert self.engine.next_wakeup_s() == NO_TIME
        self.engine.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=40)
