"""Edge cases of the engine that random tests rarely reach; each was a bug."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.executor.config import SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.simulated.clock import VirtualClock
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FinishReason, RequestSpec
from support.core import simulated_executor

BLOCK_SIZE = 2


def engine_of(*faults: Fault) -> Engine:
    """Return an engine whose clock starts at 1 s. Its executor has these faults, and each step
    takes 1 s.
    """
    clock = VirtualClock(1.0)
    cost = CostModel(step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)
    simulated = SimulatedConfig(vocab_size=50, is_strict=True, cost=cost, faults=faults)
    device = simulated_executor(
        clock, cost, block_size=BLOCK_SIZE, num_blocks=16, max_seq_len=32, simulated=simulated
    )
    return Engine(device, SchedulerConfig(), clock)


def spec_of(key: int, **fields: Any) -> RequestSpec:
    prompt = np.arange(5, dtype=np.int32)
    return RequestSpec(
        **{
            "key": key,
            "request_id": str(key),
            "prompt_ids": prompt,
            "max_tokens": 8,
            "hash_salt": b"tenant",
            "block_hashes": hash_blocks(prompt, BLOCK_SIZE, chain_root(b"tenant")),
            **fields,
        }
    )


def ends_of(engine: Engine) -> list[Completed | Failed]:
    ends: list[Completed | Failed] = []
    for _ in range(100):
        if not engine.has_work:
            break
        ends += engine.step().ends
        engine.check_integrity()
    assert not engine.has_work
    return ends


def test_a_first_token_that_came_late_still_meets_its_deadline() -> None:
    engine = engine_of(Fault(kind=FaultKind.NO_TOKENS, at_step=1))
    engine.submit((spec_of(1, ttft_deadline_s=4.5),))

    (end,) = ends_of(engine)

    assert end.reason is FinishReason.LENGTH


def test_a_follower_without_its_leader_does_not_wait_forever() -> None:
    engine = engine_of()
    engine.submit((spec_of(2, leader_key=1, output_index=1),))

    (end,) = ends_of(engine)

    assert isinstance(end, Completed)


def test_a_key_may_be_used_again_after_its_request_ended() -> None:
    engine = engine_of()
    engine.submit((spec_of(1),))
    engine.cancel(1)
    engine.step()
    engine.submit((spec_of(1, priority=-1),))

    (end,) = ends_of(engine)

    assert end.reason is FinishReason.LENGTH
