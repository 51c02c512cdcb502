"""A hypothesis state machine that submits requests to an engine over a strict device, cancels them,
injects faults and lets time pass.

`engine_invariants.py` contains the invariants that are checked after every turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    precondition,
    rule,
)
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.simulated.clock import VirtualClock
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler import waiting_queue
from penstock.scheduler.batch import Batch
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import (
    AdmissionPolicy,
    EvictionPolicy,
    SchedulerConfig,
    SchedulingOrder,
)
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, Queued, StepEvents
from penstock.scheduler.request import (
    NO_TIME,
    CacheRetention,
    Constraint,
    ConstraintKind,
    FailureReason,
    FinishReason,
    RequestSpec,
    SamplingParams,
)
from property import engine_invariants
from support.simulated_output import simulated_output

VOCAB = 50
MAX_SEQ_LEN = 32
STOP_IDS = (3, 4)
MAX_DRAIN_TURNS = 3000
CHOICE = Constraint(kind=ConstraintKind.CHOICE, texts=("any",))

# Prompts are prefixes of these and a tail, so that many share blocks.
STEMS = ([10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [10, 11, 12, 13, 20, 21, 22, 23, 24, 25])


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


# One second for each step, or a mix of all four parts.
COSTS = st.just(
    CostModel(step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)
) | st.builds(
    CostModel,
    step_s=one_of(0.1, 0.5, 1.0),
    prefill_token_s=one_of(0.0, 0.02, 0.1),
    decode_slot_s=one_of(0.0, 0.05),
    context_token_s=one_of(0.0, 0.003),
)
SETTINGS = {
    "admission_policy": one_of(*AdmissionPolicy),
    "watermark": one_of(0.0, 0.1, 0.3),
    "deadline_admission": one_of(True, True, False),
    "min_deadline_chance": one_of(0.0, 0.1, 0.5),
    "target_itl_s": one_of(None, None, 0.3, 1.5, 4.0),
    "max_num_waiting_tokens": one_of(10_000, 10_000, 60),
    "max_num_waiting_per_tenant": one_of(None, None, 4),
    "eviction": one_of(*EvictionPolicy),
    "session_ttl_s": one_of(2.0, 300.0),
    "max_session_share": one_of(0.2, 0.5, 1.0),
    "max_tenant_session_share": one_of(0.1, 0.25, 1.0),
    "max_session_tokens": one_of(8, 1000),
    "max_retention_share": one_of(0.1, 0.5, 1.0),
    "max_tenant_retention_share": one_of(0.05, 0.25, 1.0),
}
FCFS_SETTINGS = st.fixed_dictionaries({**SETTINGS, "order": st.just(SchedulingOrder.FCFS)})
FAIR_SETTINGS = st.fixed_dictionaries(
    {
        **SETTINGS,
        "order": st.just(SchedulingOrder.FAIR),
        "aging_s": one_of(3.0, 20.0, NO_TIME),
        "aging_stride": one_of(1, 3, 8),
        "max_lookahead": one_of(0, 2, 16),
        "max_num_overtakes": one_of(0, 2, 32),
        "max_overtake_s": one_of(1.0, 1e6),
        "max_prefill_share": one_of(0.5, 1.0),
        "tenant_burst_tokens": one_of(0.0, 30.0, 1e6),
        "yield_ratio": one_of(1.5, 2.0, NO_TIME),
        "tenant_weights": one_of({}, {"a": 3.0, "b": 0.5}),
        "max_num_running_per_tenant": one_of(None, None, 1, 2),
    }
)
PATIENCES = st.just((NO_TIME,) * 3) | st.tuples(
    *[one_of(NO_TIME, NO_TIME, 1.0, 3.0, 10.0, 30.0)] * 3
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt_ids": st.builds(
            lambda stem, length, tail: [*stem[:length], *tail],
            one_of(*STEMS),
            one_of(0, 5, 8, 10),
            st.lists(st.integers(5, VOCAB - 1), min_size=1, max_size=6),
        ),
        # Few exceed the model's context.
        "max_tokens": st.integers(1, 8) | st.integers(1, 16) | st.integers(1, 18),
        "min_tokens": st.integers(0, 3),
        "num_outputs": one_of(1, 1, 1, 2, 3),
        "salt": one_of(b"one", b"one", b"", b"two"),
        "priority": st.integers(-1, 1),
        "tenant": one_of("", "a", "b"),
        "patience_s": PATIENCES,
        "num_replayed": one_of(0, 0, 0, 1, 2, 3),
        "stop_ids": one_of((), STOP_IDS),
        "session_id": one_of("", "", "one", "two"),
        "retention": one_of(
            *[None] * 3,
            CacheRetention(level=10, duration_s=NO_TIME),
            CacheRetention(level=90, duration_s=3.0),
        ),
        "is_key_reused": one_of(*[False] * 9, True),
    }
)


@st.composite
def setups(draw: st.DrawFn) -> tuple[ExecutorConfig, SchedulerConfig]:
    """Draw a device with few blocks and with faults of single requests, and the
    engine's settings.
    """
    depth, num_slots, block_size = draw(one_of(1, 2)), draw(one_of(2, 4, 6)), draw(one_of(1, 2, 4))
    kinds = [FaultKind.REQUEST_FAILS]
    if depth == 1:
        kinds += [FaultKind.NO_TOKENS, FaultKind.EXTRA_TOKENS]
    faults = st.builds(
        Fault,
        kind=one_of(*kinds),
        at_step=st.integers(1, 90),
        at_output=st.none() | st.integers(0, 4),
        at_request=st.none() | st.integers(1, 20),
        max_times=st.integers(1, 3),
        num_extra=st.integers(1, 3),
    )
    cost = draw(COSTS)
    # The cost that the engine is given: none, the true one, or another device's.
    factor = draw(one_of(None, 1.0, 1.0, 2.0, 10.0, 0.1))
    device = ExecutorConfig(
        kind=ExecutorKind.SIMULATED,
        max_seq_len=MAX_SEQ_LEN,
        block_size=block_size,
        num_blocks=-(-draw(st.integers(16, 48)) // block_size),
        max_num_seqs=num_slots,
        pipeline_depth=depth,
        simulated=SimulatedConfig(
            vocab_size=VOCAB,
            is_strict=True,
            min_output_tokens=2,
            max_output_tokens=14,
            cost=cost,
            faults=tuple(draw(st.lists(faults, max_size=4))),
        ),
    )
    config = SchedulerConfig(
        known_cost=None if factor is None else scaled(cost, factor),
        max_num_waiting=12,
        max_num_batched_tokens=draw(st.integers(num_slots, 24)),
        **draw(one_of(FAIR_SETTINGS, FAIR_SETTINGS, FCFS_SETTINGS).flatmap(lambda x: x)),
    )
    return device, config


def scaled(cost: CostModel, factor: float) -> CostModel:
    return replace(
        cost,
        step_s=factor * cost.step_s,
        prefill_token_s=factor * cost.prefill_token_s,
        decode_slot_s=factor * cost.decode_slot_s,
        context_token_s=factor * cost.context_token_s,
    )


class WatchedDevice(SimulatedExecutor):
    """A strict device that also checks the token budget of every batch.

    `batches`: for each batch, the position up to which it computed each request, and the keys of
    the requests in prefill.
    """

    max_num_batched_tokens = 0
    batches: list[tuple[dict[int, int], frozenset[int]]]

    def launch(self, batch: Batch) -> None:
        assert batch.num_rows or batch.released
        assert int(batch.num_tokens.sum()) <= self.max_num_batched_tokens
        keys = batch.arrays.key[batch.slots].tolist()
        ends = (batch.starts + batch.num_tokens).tolist()
        prefilled = frozenset(keys[batch.num_decodes :])
        self.batches.append((dict(zip(keys, ends, strict=True)), prefilled))
        super().launch(batch)


@dataclass(slots=True)
class Output:
    """The events that a client received about one output of a request.

    `reference`: the tokens that must be generated. `was_alone`: no other request was live when it
    was submitted. `level`: its class when it was last admitted. `waits_since_s`: when its current
    wait began; `num_passed_by`: how many later requests were admitted during it; `first_batch`:
    number of batches launched before its last admission. `is_new`: the engine has not returned
    events since it was submitted.
    """

    spec: RequestSpec
    reference: NDArray[np.int32]
    sequence: int
    waits_since_s: float
    was_alone: bool
    tokens: list[int] = field(default_factory=list)
    end: Completed | Failed | None = None
    is_running: bool = False
    num_queued: int = 0
    num_admissions: int = 0
    num_preemptions: int = 0
    level: int = 0
    cancelled_as: FinishReason | None = None
    num_passed_by: int = 0
    first_batch: int = 0
    is_new: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.spec.priority, self.sequence)

    @property
    def line(self) -> tuple[int, str]:
        """Class and tenant: the fair order has one queue for each such pair."""
        return (self.spec.priority, self.spec.tenant)

    @property
    def expiry_s(self) -> float:
        """The earliest of the time limit and the deadlines that still count, in seconds."""
        spec = self.spec
        ttft_s = NO_TIME if self.tokens else spec.ttft_deadline_s
        return min(spec.deadline_s, spec.time_limit_s, ttft_s)


def build_engine(
    device: ExecutorConfig, config: SchedulerConfig
) -> tuple[Engine, WatchedDevice, VirtualClock]:
    clock = VirtualClock(1.0)
    executor = WatchedDevice(device, clock=clock)
    executor.max_num_batched_tokens = config.max_num_batched_tokens
    executor.batches = []
    with patch.object(waiting_queue, "FairOrder", engine_invariants.WatchedFairOrder):
        return Engine(executor, config, clock), executor, clock


class EngineMachine(RuleBasedStateMachine):
    """Clients, a clock and faults for one engine. At the end, another engine must return the same
    batches and ends for the same calls.

    `outputs`: the last output of each key; `history`: all outputs; `live`: the outputs of requests
    that have not ended.
    """

    keys = Bundle("keys")

    @initialize(setup=setups())
    def build(self, setup: tuple[ExecutorConfig, SchedulerConfig]) -> None:
        self.device, self.config = setup
        self.engine, self.executor, self.clock = build_engine(*setup)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.outputs: dict[int, Output] = {}
        self.history: list[Output] = []
        self.live: dict[int, Output] = {}
        self.ends: list[Completed | Failed] = []
        self.num_submitted = 0

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the engine, or `advance` of the clock, and record the call for the
        repetition at the end.
        """
        self.calls.append((name, arguments))
        return getattr(self.clock if name == "advance" else self.engine, name)(*arguments)

    # What clients and time do.

    @rule(target=keys, requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests: list[dict[str, Any]]) -> object:
        return multiple(*(key for request in requests for key in self.submit_one(**request)))

    def submit_one(
        self,
        *,
        prompt_ids: list[int],
        min_tokens: int,
        num_outputs: int,
        salt: bytes,
        patience_s: tuple[float, float, float],
        num_replayed: int,
        is_key_reused: bool,
        **options: Any,
    ) -> list[int]:
        """Submit one request; return the keys of its outputs.

        `patience_s`: the times until its deadline for the first token, its deadline and its time
        limit. `num_replayed`: number of its output tokens that an earlier engine had generated,
        limited to all but the last; ignored if there are several outputs. `is_key_reused`: use the
        key of a request that has ended, if there is one. `options`: further fields of its
        spec.
        """
        now = self.clock()
        self.num_submitted += 1
        first = RequestSpec(
            key=self._ended_key() if is_key_reused else self.num_submitted * 10,
            request_id=f"request-{self.num_submitted}",
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            min_tokens=min(min_tokens, options["max_tokens"]),
            sampling=SamplingParams(temperature=0.5, seed=0),
            hash_salt=salt,
            arrival_s=now,
            ttft_deadline_s=now + patience_s[0],
            deadline_s=now + patience_s[1],
            time_limit_s=now + patience_s[2],
            **options,
        )
        if num_outputs == 1 and num_replayed:
            reference = self._reference(first)
            count = min(num_replayed, len(reference) - 1)
            tokens = np.concatenate((first.prompt_ids, reference[:count]))
            first = replace(first, prompt_ids=tokens, num_replayed=count)
        if salt:
            hashes = hash_blocks(first.prompt_ids, self.device.block_size, chain_root(salt))
            first = replace(first, block_hashes=hashes)
        specs = [first] + [
            replace(
                first,
                key=first.key + index,
                sampling=SamplingParams(temperature=0.5, seed=index),
                leader_key=first.key,
                output_index=index,
            )
            for index in range(1, num_outputs)
        ]
        was_alone = not self.engine.has_work
        for spec in specs:
            reference = self._reference(spec)[spec.num_replayed :]
            output = Output(spec, reference, len(self.history), now, was_alone)
            self.outputs[spec.key] = self.live[spec.key] = output
            self.history.append(output)
        self.call("submit", tuple(specs))
        return [spec.key for spec in specs]

    def _reference(self, spec: RequestSpec) -> NDArray[np.int32]:
        return simulated_output(spec, VOCAB, self.device.simulated)

    def _ended_key(self) -> int:
        """Return the key of a request whose outputs have all ended; a new key if there is none."""
        live = {key // 10 for key in self.live}
        ended = {key // 10 for key in self.outputs} - live
        return 10 * min(ended, default=self.num_submitted)

    # One rule for all that is rare: each rule is tried as often as any other.
    @rule(key=keys, what=one_of(*["cancel"] * 3, "again", *["time"] * 3), data=st.data())
    def disturb(self, key: int, what: str, data: st.DataObject) -> None:
        """Cancel an output, submit a live id again, or let time pass."""
        if what == "cancel":
            self.cancel(key, data.draw(st.sampled_from([*FinishReason, None])))
        elif what == "time":
            self.call("advance", data.draw(one_of(0.5, 1.0, 2.0, 5.0, 600.0)))
        elif key in self.engine.requests:
            self.call("submit", (self.outputs[key].spec,))
            ends = self.engine.events.ends
            (rejection,) = (end for end in ends if end.key == key)
            assert isinstance(rejection, Failed)
            assert rejection.reason is FailureReason.REQUEST_ID_IN_USE
            ends.remove(rejection)

    def cancel(self, key: int, reason: FinishReason | None) -> None:
        """Cancel one output with a reason; without one, all outputs of the request."""
        output = self.outputs[key]
        if reason is None:
            request_id = output.spec.request_id
            was_cancelled = self.call("cancel_by_id", request_id)
            assert not self.engine.cancel_by_id(request_id)
            for other in self.live.values():
                if other.spec.request_id == request_id and was_cancelled:
                    other.cancelled_as = other.cancelled_as or FinishReason.CANCELLED
        elif self.call("cancel", key, reason):
            assert output.end is None
            assert output.cancelled_as is None
            output.cancelled_as = reason
            assert not self.engine.cancel(key)

    # The engine's turns.

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            before_s, num_batches = self.clock(), len(self.executor.batches)
            events = self.call("step")
            engine_invariants.check_order(self, events)
            engine_invariants.check_waits(self, events, num_batches)
            self._receive(events)
            for output in self.live.values():
                output.is_new = False
                assert before_s < output.expiry_s, "it was late when the turn began"
            engine_invariants.check_accounts(self)

    def _receive(self, events: StepEvents) -> None:
        """Add the events to the outputs; check that each event is possible in the
        output's state.
        """
        for change in events.changes:
            output = self.outputs[change.key]
            assert output.end is None
            match change:
                case Queued():
                    output.num_queued += 1
                    engine_invariants.check_queued(self, output, change)
                case Admitted():
                    assert not output.is_running
                    output.num_admissions += 1
                    engine_invariants.check_cached(self, output, change)
                case Preempted():
                    assert output.is_running
                    output.num_preemptions += 1
                case _:
                    raise AssertionError(f"this executor reports no {change}")
            output.is_running = isinstance(change, Admitted)
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            output = self.outputs[key]
            assert output.end is None
            assert output.num_admissions > 0
            assert output.reference[len(output.tokens)] == token
            output.tokens.append(token)
        for end in events.ends:
            output = self.outputs[end.key]
            assert output.end is None
            output.end = end
            self.ends.append(end)
            del self.live[end.key]
            engine_invariants.check_end(self, output, end)
            output.is_running = False

    def teardown(self) -> None:
        """Run until no work is left; check that every output has ended, and that no
        block is in use.
        """
        if not hasattr(self, "engine"):
            return
        for _ in range(MAX_DRAIN_TURNS):
            if not self.engine.has_work:
                break
            self.step(count=1)
        assert not self.engine.has_work
        assert not self.live
        queued = {output.spec.request_id for output in self.history if output.num_queued}
        for output in self.history:
            assert output.end is not None
            assert not output.num_admissions or output.spec.request_id in queued
        assert self.engine.cache.pool.num_used == 0
        assert self.engine.next_wakeup_s() == NO_TIME
        self.engine.close()
        self._check_the_same_again()

    def _check_the_same_again(self) -> None:
        engine, executor, clock = build_engine(self.device, self.config)
        ends: list[Completed | Failed] = []
        for name, arguments in self.calls:
            found = getattr(clock if name == "advance" else engine, name)(*arguments)
            if name == "step":
                ends += found.ends
        assert executor.batches == self.executor.batches
        # The ends of one turn may be in any order.
        ends = [end for end in ends if end.reason is not FailureReason.REQUEST_ID_IN_USE]
        assert sorted(ends, key=_of_output) == sorted(self.ends, key=_of_output)


def _of_output(end: Completed | Failed) -> tuple[int, float]:
    return end.key, end.at_s
