"""Many requests that end at once are cancelled between steps, a limited number each time.

Pending cancels count as work: the loop does not sleep before they are done.
"""

import numpy as np
import pytest

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.ipc.frames import Cancel, Submit
from support.link import KEPT_LIMITS, FakeEngine, hello, spec
from support.self_paced import make_self_paced

NUM_REQUESTS = 1000
NUM_QUEUED = 600
MOST_AT_ONCE = 100


def step(dispatcher: Dispatcher, engine: FakeEngine) -> None:
    engine.updates.put(
        StepEvents(
            step=1,
            at_s=0.0,
            keys=np.empty(0, dtype=np.int64),
            tokens=np.empty(0, dtype=np.int32),
        )
    )
    dispatcher.step()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def dispatcher(engine: FakeEngine) -> Dispatcher:
    dispatcher = Dispatcher(engine, hello(), kept_limits=KEPT_LIMITS)
    dispatcher.front_connected(1)
    specs = tuple(spec(1, counter) for counter in range(1, NUM_REQUESTS + 1))
    dispatcher.handle_frame(1, Submit(specs=specs))
    return dispatcher


def all_keys() -> set[int]:
    return {spec(1, counter).key for counter in range(1, NUM_REQUESTS + 1)}


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "released"])
def test_many_are_cancelled_over_several_steps(
    dispatcher: Dispatcher, engine: FakeEngine, is_gone: bool
) -> None:
    if is_gone:
        dispatcher.front_disconnected(1)
    else:
        keys = np.array(sorted(all_keys()), dtype=np.int64)
        dispatcher.handle_frame(1, Cancel(keys=keys, reason=FinishReason.CANCELLED))

    seen = 0
    for _ in range(NUM_REQUESTS):
        now = engine.cancelled.qsize()
        assert 0 < now - seen <= MOST_AT_ONCE
        seen = now
        if seen == NUM_REQUESTS:
            break
        step(dispatcher, engine)
    assert set(engine.cancelled.queue) == all_keys()
    step(dispatcher, engine)
    assert engine.cancelled.qsize() == NUM_REQUESTS


def test_a_front_that_reconnects_finds_its_keys_free(
    dispatcher: Dispatcher, engine: FakeEngine
) -> None:
    dispatcher.front_disconnected(1)
    dispatcher.front_connected(1)

    assert set(engine.cancelled.queue) == all_keys()
    dispatcher.handle_frame(1, Submit(specs=(spec(1, 1),)))
    step(dispatcher, engine)
    assert engine.cancelled.qsize() == NUM_REQUESTS


def test_queued_requests_of_a_lost_front_are_cancelled_before_the_loop_sleeps() -> None:
    engine, executor = make_self_paced(max_num_seqs=1)
    dispatcher = Dispatcher(engine, hello(), kept_limits=KEPT_LIMITS)
    dispatcher.front_connected(1)
    for counter in range(1, NUM_QUEUED + 1):
        dispatcher.handle_frame(1, Submit(specs=(spec(1, counter),)))
    dispatcher.step()

    dispatcher.front_disconnected(1)
    num_steps = 0
    # The executor is silent: nothing but the cancels gives the loop a reason to step.
    while dispatcher.has_pending_work:
        dispatcher.step()
        num_steps += 1

    assert engine.queue_size == (0, 0)
    assert 1 < num_steps < NUM_QUEUED / 10, "in portions: fronts are served between them"
    executor.close()
