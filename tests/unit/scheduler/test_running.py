"""Which slot a request gets, and in which order running requests prefill."""

from penstock.scheduler.request import Request, RequestSpec
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from support.core import make_spec


def request(spec: RequestSpec, sequence: int) -> Request:
    return Request(spec=spec, sequence=sequence, tokens=spec.prompt_ids, block_hashes=[])


def make_running(num_slots: int = 4) -> RunningSet:
    return RunningSet(SlotArrays(num_slots=num_slots, max_seq_len=16, block_size=4))


def test_the_lowest_free_slot_is_taken_and_columns_stay_short() -> None:
    running = make_running()
    requests = [request(make_spec(key), key) for key in (1, 2, 3)]
    assert [running.take_slot(one) for one in requests] == [0, 1, 2]
    running.release_slot(1)
    assert running.high_water == 3
    running.release_slot(2)
    assert running.high_water == 1
    assert running.take_slot(requests[1]) == 1
    assert len(running) == 2


def test_prefills_continue_in_order_of_seniority_not_of_slot() -> None:
    # A chunk that was granted must not lose its blocks to a later one of the same step.
    running = make_running()
    junior, urgent, senior = (
        request(make_spec(1), 7),
        request(make_spec(2, priority=3), 8),
        request(make_spec(3), 5),
    )
    for one in (junior, urgent, senior):
        running.take_slot(one)
    assert running.prefilling() == [urgent, senior, junior]
    assert running.most_junior() is junior
