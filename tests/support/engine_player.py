"""Simulates clients, time and faults against one engine, and checks its output.

Contains the actions of a game and its turn; the modules of laws define the invariants.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault
from penstock.executor.simulated.pace import VirtualClock
from penstock.scheduler import waiting_queue
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import (
    AdmissionPolicy,
    SchedulerConfig,
    SchedulingOrder,
)
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Finished, Preempted, Queued, StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.fair_order import FairOrder
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
from penstock.scheduler.tenants import Tenants
from support.game_laws import (
    check_accounts,
    check_failure,
    check_finish,
    check_history,
    check_never,
    check_order,
    check_queued,
    check_refused_alone,
    check_waits,
)
from support.game_records import BudgetedExecutor, Game, OrderWitness, Told
from support.simulated_output import simulated_output

VOCAB = 50
MAX_SEQ_LEN = 32
MAX_WAITING = 12
STOP_IDS = (3, 4)
MAX_DRAIN_TURNS = 3000
CHOICE = Constraint(kind=ConstraintKind.CHOICE, texts=("any",))


class EnginePlayer:
    """One game.

    `prices`: step_s, prefill_token_s, decode_slot_s and context_token_s of the device;
    `known_cost`: the prices that the engine is given, None for none. `settings`: more fields of
    SchedulerConfig.
    """

    def __init__(
        self,
        *,
        depth: int,
        faults: list[Fault],
        block_size: int,
        pool_tokens: int,
        num_slots: int,
        budget: int,
        policy: AdmissionPolicy,
        watermark: float,
        order: SchedulingOrder,
        prices: list[float],
        known_cost: list[float] | None,
        settings: dict[str, Any],
    ) -> None:
        self.simulated = SimulatedConfig(
            vocab_size=VOCAB,
            is_strict=True,
            min_output_tokens=2,
            max_output_tokens=14,
            cost=cost_model(prices),
            faults=tuple(faults),
        )
        clock = VirtualClock(1.0)
        device = ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            block_size=block_size,
            num_blocks=-(-pool_tokens // block_size),
            max_num_seqs=num_slots,
            max_seq_len=MAX_SEQ_LEN,
            pipeline_depth=depth,
            simulated=self.simulated,
        )
        executor = BudgetedExecutor(device, pacer=clock)
        executor.max_num_batched_tokens = budget
        executor.log, executor.rows = [], []
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            admission_policy=policy,
            watermark=watermark,
            order=order,
            known_cost=None if known_cost is None else cost_model(known_cost),
            max_num_waiting=MAX_WAITING,
            **settings,
        )
        engine, witness = watched(executor, config, clock)
        self.game = Game(
            engine=engine,
            executor=executor,
            clock=clock,
            config=config,
            simulated=self.simulated,
            witness=witness,
            knows_prices=known_cost == prices,
        )
        self.num_submitted = 0
        self.num_turns = 0

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
        has_form: bool,
        session: str,
        retention: list[float] | None,
        is_key_reused: bool,
    ) -> list[int]:
        """Submit one request; return the keys of its outputs."""
        game, now = self.game, self.game.clock()
        prompt = np.array(prompt_ids, dtype=np.int32)
        self.num_submitted += 1
        first_key = self.ended_key() if is_key_reused else self.num_submitted * 10
        first = RequestSpec(
            key=first_key,
            request_id=f"request-{self.num_submitted}",
            prompt_ids=prompt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_ids=STOP_IDS if has_stops else (),
            sampling=SamplingParams(temperature=0.5, seed=0),
            hash_salt=salt.encode(),
            block_hashes=self.digests(prompt, salt.encode()),
            priority=priority,
            tenant=tenant,
            arrival_s=now,
            ttft_deadline_s=now + patience_s[0],
            deadline_s=now + patience_s[1],
            time_limit_s=now + patience_s[2],
            constraint=CHOICE if has_form else None,
            session_id=session,
            retention=retained(retention),
        )
        specs = [self.replayed(first, num_replayed) if num_outputs == 1 else first]
        specs += [follower(first, index) for index in range(1, num_outputs)]
        self.note(specs)
        game.engine.submit(tuple(specs))
        for key, request in game.engine.requests.items():
            game.told[key].is_trial = request.is_trial
        return [spec.key for spec in specs]

    def note(self, specs: list[RequestSpec]) -> None:
        """Record the expected result of each output."""
        game = self.game
        was_alone = not game.engine.has_work
        for spec in specs:
            reference = simulated_output(spec, VOCAB, self.simulated)[spec.num_replayed :]
            told = Told(spec, reference, len(game.history), was_alone)
            told.waits_since_s = game.clock()
            game.told[spec.key] = game.live[spec.key] = told
            game.history.append(told)

    def ended_key(self) -> int:
        """Return the first key of a request whose outputs have all ended, or a new one."""
        live = {key // 10 for key in self.game.live}
        ended = {key // 10 for key in self.game.told} - live
        return 10 * min(ended, default=self.num_submitted)

    def digests(self, tokens: NDArray[np.int32], salt: bytes) -> tuple[bytes, ...]:
        block_size = self.game.executor.info.block_size
        return hash_blocks(tokens, block_size, chain_root(salt)) if salt else ()

    def replayed(self, spec: RequestSpec, num_replayed: int) -> RequestSpec:
        """Return the request as replayed after `num_replayed` tokens of its output."""
        if not num_replayed:
            return spec
        output = simulated_output(spec, VOCAB, self.simulated)
        count = min(num_replayed, len(output) - 1)
        tokens = np.concatenate((spec.prompt_ids, output[:count]))
        hashes = self.digests(tokens, spec.hash_salt)
        return replace(spec, prompt_ids=tokens, num_replayed=count, block_hashes=hashes)

    def step(self, *, count: int) -> None:
        for _ in range(count):
            self.turn()

    def turn(self) -> None:
        game, before_s = self.game, self.game.clock()
        self.num_turns += 1
        num_launched = len(game.executor.rows)
        events = game.engine.step()
        check_order(game, events)
        check_waits(game, events, num_launched)
        self.take(events)
        for told in game.live.values():
            told.is_refusable = False
        check_accounts(game)
        # Whose time had passed when the turn began was ended in it.
        assert all(before_s < told.expiry_s for told in game.live.values())

    def cancel(self, *, key: int, reason: int | None) -> None:
        """Cancel one output with a reason, or all outputs of the request without one."""
        told = self.game.told[key]
        if reason is None:
            self.cancel_by_id(told.spec.request_id)
            return
        was_cancelled = self.game.engine.cancel(key, FinishReason(reason))
        if told.end is not None:
            assert not was_cancelled
        if was_cancelled:
            assert told.cancelled_as is None
            told.cancelled_as = FinishReason(reason)
            assert not self.game.engine.cancel(key)

    def cancel_by_id(self, request_id: str) -> None:
        was_cancelled = self.game.engine.cancel_by_id(request_id)
        assert not self.game.engine.cancel_by_id(request_id)
        for told in self.game.live.values():
            if told.spec.request_id == request_id and was_cancelled:
                told.cancelled_as = told.cancelled_as or FinishReason.CANCELLED

    def submit_again(self, *, key: int) -> None:
        """Submit a live id a second time."""
        if key not in self.game.engine.requests:
            return
        self.game.engine.submit((self.game.told[key].spec,))
        refusals = [end for end in self.game.engine.events.ends if end.key == key]
        assert [end.reason for end in refusals] == [FailureReason.REQUEST_ID_IN_USE]
        self.game.engine.events.ends.remove(refusals[0])

    def pass_time(self, *, seconds: float) -> None:
        """Advance the clock without a turn."""
        self.game.clock.advance(seconds)

    def take(self, events: StepEvents) -> None:
        """Record the events for their clients; check that each client may receive them now."""
        told_of, live = self.game.told, self.game.live
        for change in events.changes:
            told = told_of[change.key]
            assert told.end is None
            match change:
                case Queued():
                    told.num_queued += 1
                    check_queued(self.game, told, change)
                case Admitted() | Preempted():
                    assert told.is_running is isinstance(change, Preempted)
                    told.is_running = not told.is_running
                    told.num_admissions += told.is_running
                    told.num_preemptions += not told.is_running
                case _:
                    raise AssertionError(f"{change} is not for this executor to say")
            if isinstance(change, Admitted):
                self.check_cached(told, change)
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            told = told_of[key]
            assert told.end is None
            assert told.num_admissions > 0
            assert told.reference[len(told.tokens)] == token
            told.tokens.append(token)
        for end in events.ends:
            told = told_of[end.key]
            assert told.end is None
            told.end = end
            del live[end.key]
            if isinstance(end, Finished):
                check_finish(self.game, told, end)
            else:
                check_failure(self.game, told, end)
                check_refused_alone(self.game, told, end)
                check_never(self.game, told, end)
            told.is_running = False

    def check_cached(self, told: Told, admitted: Admitted) -> None:
        """Check that whole salted blocks are cached, and never the last token, which is to be
        computed.
        """
        num_tokens = told.spec.num_prompt_tokens + len(told.tokens)
        told.num_cached_tokens += admitted.num_cached_tokens
        assert admitted.num_preemptions == told.num_preemptions
        assert 0 <= admitted.num_cached_tokens < num_tokens
        assert admitted.num_cached_tokens % self.game.executor.info.block_size == 0
        assert told.spec.hash_salt or not admitted.num_cached_tokens

    def finish(self) -> None:
        """Run until no work is left; check that every client ended once and everything was
        released.
        """
        game, engine = self.game, self.game.engine
        for _ in range(MAX_DRAIN_TURNS):
            if not engine.has_work:
                break
            self.turn()
        assert not engine.has_work
        assert not game.live
        check_history(game)
        assert engine.cache.pool.num_used == 0
        assert engine.next_wakeup_s() == NO_TIME
        engine.close()


def cost_model(prices: list[float]) -> CostModel:
    return CostModel(
        step_s=prices[0],
        prefill_token_s=prices[1],
        decode_slot_s=prices[2],
        context_token_s=prices[3],
    )


def retained(retention: list[float] | None) -> CacheRetention | None:
    if retention is None:
        return None
    return CacheRetention(level=int(retention[0]), duration_s=retention[1])


def watched(
    executor: Executor, config: SchedulerConfig, clock: VirtualClock
) -> tuple[Engine, OrderWitness | None]:
    """Return an engine and the witness in front of its fair order."""
    found: list[OrderWitness] = []

    def witnessed(tenants: Tenants, config: SchedulerConfig) -> OrderWitness:
        found.append(OrderWitness(FairOrder(tenants, config), config))
        return found[-1]

    with patch.object(waiting_queue, "FairOrder", witnessed):
        engine = Engine(executor, config, clock)
    return engine, found[0] if found else None


def follower(leader: RequestSpec, index: int) -> RequestSpec:
    """Return another output of the same request."""
    return replace(
        leader,
        key=leader.key + index,
        sampling=SamplingParams(temperature=0.5, seed=index),
        leader_key=leader.key,
        output_index=index,
    )
