"""Pending cancels count as work: the loop does not sleep before they are done."""

from __future__ import annotations

from penstock.server.engine.dispatch import Dispatcher
from penstock.server.link.frames import Submit
from support.link import hello, spec
from support.self_paced import make_self_paced

NUM_QUEUED = 600


def test_the_queue_of_a_dead_front_is_empty_before_the_loop_rests() -> None:
    engine, executor = make_self_paced(max_num_seqs=1)
    dispatcher = Dispatcher(engine, hello())
    dispatcher.front_connected(1)
    for counter in range(1, NUM_QUEUED + 1):
        dispatcher.handle(1, Submit(specs=(spec(1, counter),)))
    dispatcher.step()

    dispatcher.front_gone(1)
    num_steps = 0
    # The executor is silent: nothing but the cancels gives the loop a reason to step.
    while dispatcher.has_own_work:
        dispatcher.step()
        num_steps += 1

    assert engine.queue_size == (0, 0)
    assert 1 < num_steps < NUM_QUEUED / 10, "in portions: fronts are served between them"
    executor.close()
