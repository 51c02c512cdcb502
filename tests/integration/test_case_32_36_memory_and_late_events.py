"""Cases 32, 35 and 36: requests with too little memory, events of cancelled requests, and cleanup
while no request runs.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.create import create_executor
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Preempted, StepEvents
from penstock.scheduler.request import FinishReason
from penstock.server.text.model_text import ModelText
from support.core import FakeClock, make_engine, make_info, make_spec
from support.fronts import ServedFront, collect, text_of
from support.simulated_output import simulated_output
from support.stepped_service import request, stepped

VOCAB = 500
BLOCK_SIZE = 16
NUM_REQUESTS = 32
PROMPT, NUM_TOKENS = 20, 80
"""32 requests of 100 tokens need 7 blocks each, more than 200 in total; there are 64."""
PROGRESS_STEPS = 100


@pytest.mark.parametrize("depth", [1, 2])
def test_case_32_more_requests_than_memory(depth: int) -> None:
    executor = create_executor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            block_size=BLOCK_SIZE,
            num_blocks=64,
            max_seq_len=256,
            max_num_seqs=NUM_REQUESTS,
            pipeline_depth=depth,
            simulated=SimulatedConfig(vocab_size=VOCAB, is_strict=True),
        )
    )
    config = SchedulerConfig(admission_policy=AdmissionPolicy.MAX_UTILIZATION)
    engine = Engine(executor, config, FakeClock())
    specs = {
        key: make_spec(
            key,
            [(key * 7 + i) % VOCAB for i in range(PROMPT)],
            max_tokens=NUM_TOKENS,
            block_size=BLOCK_SIZE,
        )
        for key in range(1, NUM_REQUESTS + 1)
    }
    for spec in specs.values():
        engine.submit((spec,))
    outputs: dict[int, list[int]] = {key: [] for key in specs}
    ends: dict[int, object] = {}
    num_preemptions = num_idle = 0
    while engine.has_work:
        events = engine.step()
        engine.check_integrity()
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            outputs[key].append(token)
        num_preemptions += sum(isinstance(change, Preempted) for change in events.changes)
        ends |= {end.key: end for end in events.ends}
        num_idle = 0 if len(events.keys) else num_idle + 1
        assert num_idle < PROGRESS_STEPS, "nobody gets anything any more"
    assert num_preemptions > 0, "the memory was not too small"
    assert set(ends) == set(specs)
    for key, spec in specs.items():
        end = ends[key]
        assert isinstance(end, Completed)
        assert end.reason is FinishReason.LENGTH
        np.testing.assert_array_equal(outputs[key], simulated_output(spec, VOCAB))
    assert engine.cache.pool.num_used == 0


async def test_case_35_late_events_of_a_cancelled_request(
    served: ServedFront, caplog: pytest.LogCaptureFixture
) -> None:
    """Events that arrive for a cancelled request (an admission, a token and an end) or for an
    unknown key are counted and have no other effect.
    """
    caplog.set_level(logging.WARNING)
    leaving = served.stub.Generate(request(50))
    (gone,) = await served.port.next_submission()
    staying = served.stub.Generate(request(50))
    (here,) = await served.port.next_submission()
    leaving.cancel()
    keys, _ = await served.port.next_cancel()
    assert keys == (gone.key,)
    counters = served.server.front.counters
    assert counters.num_late_events == 0
    token_id = served.encode("a")[0]
    served.port.admit(gone.key)
    assert counters.num_late_events == 1
    served.port.emit(tokens=[(gone.key, token_id), (here.key, token_id)])
    assert counters.num_late_events == 2
    served.port.finish(gone.key)
    assert counters.num_late_events == 3
    served.port.admit(gone.key + 999)
    assert counters.num_late_events == 4, "so is an event of a key that nobody ever had"
    served.port.finish(here.key)
    assert text_of(await collect(staying)) == "a"
    assert served.server.num_live_requests == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def steps_until_clean(engine: Engine, most: int) -> list[StepEvents]:
    reported: list[StepEvents] = []
    while engine.has_work:
        assert len(reported) < most, "cleaning up takes too long"
        reported.append(engine.step())
        engine.check_integrity()
    return reported


@pytest.mark.parametrize("depth", [1, 2])
def test_case_36_cleanup_without_running_requests(depth: int) -> None:
    engine, executor = make_engine(make_info(pipeline_depth=depth))
    for key in range(1, 7):
        engine.submit((make_spec(key, max_tokens=40),))
    for _ in range(4):
        engine.step()
    slots = {request.slot for request in engine.running}
    assert slots
    for key in range(1, 7):
        assert engine.cancel(key)
    assert engine.has_work, "somebody has to be told"
    # The results of steps in flight arrive, and then a turn reports the free slots to the executor.
    reported = steps_until_clean(engine, 2 + (depth - 1))
    assert {end.key for events in reported for end in events.ends} == set(range(1, 7))
    assert engine.cache.pool.num_used == 0
    assert set(executor.released) >= slots


async def test_case_36_cleanup_after_the_last_client_disconnects(text: ModelText) -> None:
    async with stepped(text) as service:
        calls = [service.stub.Generate(request(200)) for _ in range(6)]
        await service.until_live(6)
        service.step(3)
        assert service.num_used_blocks
        for call in calls:
            call.cancel()
        await service.until_released()
        service.step(2)
        assert service.is_clean()
        assert not service.step(), "nothing is left to do"
