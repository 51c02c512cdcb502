"""Plays clients, time and faults against one engine, and checks what it tells.

Every action is recorded; `replay(trace)` repeats a game from its trace, which is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.simulated.pace import VirtualClock
from penstock.executor.simulated.tokens import simulated_output
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig, SchedulingOrder
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
from support.game_records import BudgetedExecutor, Told

VOCAB = 50
MAX_SEQ_LEN = 32
MAX_NUM_SEQS = 4
MAX_WAITING = 12
STOP_IDS = (3, 4)
MAX_DRAIN_STEPS = 3000
# Prompts are prefixes of these and a tail, so that many share blocks.
STEMS = ((10, 11, 12, 13, 14, 15, 16, 17, 18, 19), (10, 11, 12, 13, 20, 21, 22, 23, 24, 25))


def replay(trace: str) -> EnginePlayer:
    """Play a recorded game again, to its end."""
    (_, setup), *actions = json.loads(trace)
    setup["faults"] = [
        Fault(**(fault | {"kind": FaultKind(fault["kind"])})) for fault in setup["faults"]
    ]
    player = EnginePlayer(**setup)
    for name, arguments in actions:
        getattr(player, name)(**arguments)
    player.finish()
    return player


class EnginePlayer:
    """One game. Arguments and those of actions are plain values, so that a trace is JSON."""

    def __init__(
        self,
        *,
        depth: int,
        faults: Sequence[Fault],
        block_size: int,
        pool_tokens: int,
        budget: int,
        policy: str,
        watermark: float,
        order: str,
        fair: dict[str, Any],
    ) -> None:
        self.trace: list[tuple[str, dict[str, Any]]] = []
        self.record(
            "build",
            depth=depth,
            faults=[asdict(fault) | {"kind": fault.kind.value} for fault in faults],
            block_size=block_size,
            pool_tokens=pool_tokens,
            budget=budget,
            policy=policy,
            watermark=watermark,
            order=order,
            fair=fair,
        )
        self.faults = tuple(faults)
        self.block_size = block_size
        self.num_blocks = -(-pool_tokens // block_size)
        self.simulated = SimulatedConfig(
            vocab_size=VOCAB,
            is_strict=True,
            min_output_tokens=2,
            max_output_tokens=14,
            cost=CostModel(step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0),
            faults=self.faults,
        )
        self.clock = VirtualClock(1.0)
        self.executor = self.device(depth, budget)
        self.config = SchedulerConfig(
            max_num_batched_tokens=budget,
            admission_policy=AdmissionPolicy(policy),
            watermark=watermark,
            max_num_waiting=MAX_WAITING,
            order=SchedulingOrder(order),
            **fair,
        )
        self.engine = Engine(self.executor, self.config, self.clock)
        self.told: dict[int, Told] = {}
        self.history: list[Told] = []
        self.num_submitted = 0

    def device(self, depth: int, budget: int) -> BudgetedExecutor:
        executor = BudgetedExecutor(
            ExecutorConfig(
                kind=ExecutorKind.SIMULATED,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                max_num_seqs=MAX_NUM_SEQS,
                max_seq_len=MAX_SEQ_LEN,
                pipeline_depth=depth,
                simulated=self.simulated,
            ),
            pacer=self.clock,
        )
        executor.max_num_batched_tokens = budget
        executor.log = []
        return executor

    def record(self, name: str, **arguments: Any) -> None:
        self.trace.append((name, arguments))

    def dumped(self) -> str:
        """The trace, for `replay`."""
        return json.dumps(self.trace)

    def submit(
        self,
        *,
        prompt_ids: list[int],
        max_tokens: int,
        min_tokens: int,
        num_outputs: int,
        salt: str,
        priority: int,
        tenant: str,
        patience_s: list[float],
        num_replayed: int,
        has_stops: bool,
        is_key_reused: bool,
    ) -> list[int]:
        """Submit one request; the keys of its outputs."""
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.record("submit", **arguments)
        prompt = np.array(prompt_ids, dtype=np.int32)
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
                hash_salt=salt.encode(),
                block_hashes=self.digests(prompt, salt.encode()),
                leader_key=first_key if index else 0,
                output_index=index,
                priority=priority,
                tenant=tenant,
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
        return [spec.key for spec in specs]

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
            tenant=spec.tenant,
            arrival_s=spec.arrival_s,
            ttft_deadline_s=spec.ttft_deadline_s,
            deadline_s=spec.deadline_s,
            time_limit_s=spec.time_limit_s,
        )

    def step(self, *, count: int) -> None:
        """Some turns."""
        self.record("step", count=count)
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

    def cancel(self, *, key: int, reason: int | None) -> None:
        """One output for a reason, or without one all outputs by the request's id."""
        self.record("cancel", key=key, reason=reason)
        if reason is None:
            self.cancel_by_id(self.told[key].spec.request_id)
            return
        told = self.told[key]
        was_cancelled = self.engine.cancel(key, FinishReason(reason))
        if told.end is not None:
            assert not was_cancelled
        if was_cancelled:
            assert told.cancelled_as is None
            told.cancelled_as = FinishReason(reason)
            assert not self.engine.cancel(key)

    def cancel_by_id(self, request_id: str) -> None:
        was_cancelled = self.engine.cancel_by_id(request_id)
        assert not self.engine.cancel_by_id(request_id)
        for told in self.told.values():
            if told.spec.request_id == request_id and told.end is None and was_cancelled:
                told.cancelled_as = told.cancelled_as or FinishReason.CANCELLED

    def submit_again(self, *, key: int) -> None:
        """A live id a second time."""
        self.record("submit_again", key=key)
        if key not in self.engine.scheduler.life.requests:
            return
        self.engine.submit((self.told[key].spec,))
        refusals = [end for end in self.engine.scheduler.life.ends if end.key == key]
        assert [end.reason for end in refusals] == [FailureReason.REQUEST_ID_IN_USE]
        self.engine.scheduler.life.ends.remove(refusals[0])

    def pass_time(self, *, seconds: int) -> None:
        """Nothing happens for a while."""
        self.record("pass_time", seconds=seconds)
        self.clock.advance(float(seconds))

    def check_order(self, events: StepEvents) -> None:
        """Nobody new in a step that preempted; seniority (FCFS) or classes and limits (FAIR)."""
        preempted = {change.key for change in events.changes if isinstance(change, Preempted)}
        admitted = {change.key for change in events.changes if isinstance(change, Admitted)}
        assert not (preempted and admitted)
        ended = {end.key for end in events.ends}
        live = {k: told for k, told in self.told.items() if told.end is None and k not in ended}
        running = {key for key, told in live.items() if told.is_running}
        if self.config.order is SchedulingOrder.FCFS:
            self.check_seniority(events, live, running, preempted)
        else:
            self.check_levels(live, running, preempted, admitted)

    def check_seniority(
        self,
        events: StepEvents,
        live: dict[int, Told],
        running: set[int],
        preempted: set[int],
    ) -> None:
        """Nobody is admitted before a senior who may run, nor preempted before a junior."""
        for change in events.changes:
            rank = self.told[change.key].rank
            if isinstance(change, Preempted):
                assert all(live[key].rank < rank for key in running - preempted)
            else:
                # Outputs after the first may wait for their leader.
                waiting = [told for key, told in live.items() if key not in running]
                assert all(told.rank >= rank for told in waiting if not told.spec.leader_key)
                running.add(change.key)

    def check_levels(
        self, live: dict[int, Told], running: set[int], preempted: set[int], admitted: set[int]
    ) -> None:
        for key in preempted & live.keys():
            assert all(live[key].level <= live[other].level for other in running - preempted)
        thrown_out = [
            told for key, told in live.items() if told.num_preemptions and key not in running
        ]
        life = self.engine.scheduler.life
        for key in admitted & life.requests.keys():
            request, told = life.requests[key], self.told[key]
            told.level = int(life.arrays.level[request.slot])
            # Whom a preemption threw out stands before the fresh of its class and tenant.
            if not told.num_preemptions:
                peers = (told.spec.tenant, told.spec.priority)
                assert all(
                    other.spec.key in admitted or (other.spec.tenant, other.spec.priority) != peers
                    for other in thrown_out
                )
        most = self.config.max_num_running_per_tenant
        if most is not None:
            assert max(life.tenants.num_running, default=0) <= most

    def take(self, events: StepEvents) -> None:
        for change in events.changes:
            told = self.told[change.key]
            assert told.end is None
            assert told.is_running is not isinstance(change, Admitted)
            told.is_running = not told.is_running
            told.num_admissions += told.is_running
            told.num_preemptions += isinstance(change, Preempted)
        assert len(events.keys) == len(events.tokens)
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            told = self.told[key]
            assert told.end is None
            assert told.num_admissions > 0
            told.tokens.append(token)
            assert told.tokens == told.reference[: len(told.tokens)].tolist()
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
            case FailureReason.TENANT_OVER_QUOTA:
                assert self.config.max_num_waiting_per_tenant is not None
                assert told.num_admissions == 0
            case FailureReason.QUEUE_FULL:
                assert told.num_admissions == 0
            case _:
                raise AssertionError(f"{end.reason.name} was never caused")

    def finish(self) -> None:
        """Run until nothing is left: everybody ended once, and everything was given back."""
        for _ in range(MAX_DRAIN_STEPS):
            if not self.engine.has_work:
                break
            self.turn()
        assert not self.engine.has_work
        assert all(told.end is not None for told in self.history)
        assert self.engine.scheduler.life.cache.pool.num_used == 0
        assert self.engine.next_wakeup_s() == NO_TIME
        self.engine.close()
