"""A front rejects requests according to the queue state that the engine publishes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from penstock.server.front.admission_estimate import AdmissionEstimate
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.front.generation import Urgency
from penstock.server.front.live_request import LiveRequest
from penstock.server.ipc.frames import EngineHello
from support.fronts import INFO
from support.published_queue import PublishedBoard
from support.replay_harness import generation

EPOCH = 3
HELLO = EngineHello(
    epoch=EPOCH, model="tiny", executor=INFO, max_num_waiting=10, max_num_waiting_tokens=100
)


def failure(
    estimate: AdmissionEstimate, num_requests: int = 1, num_tokens: int = 0
) -> RequestError | None:
    try:
        estimate.check(HELLO, num_requests, num_tokens)
    except RequestError as error:
        return error
    return None


def test_the_bound_on_requests_holds_for_all_outputs_of_one() -> None:
    shown = PublishedBoard(EPOCH)
    estimate = AdmissionEstimate(shown.view)
    shown.show(8, queue_s=2.5)
    assert failure(estimate, 2) is None
    error = failure(estimate, 3)
    assert error is not None
    assert error.reason is ErrorReason.QUEUE_FULL
    assert error.failure.retry_after_s == 2.5
    assert estimate.num_rejected == 1


def test_the_bound_on_tokens_lets_small_ones_in() -> None:
    shown = PublishedBoard(EPOCH)
    estimate = AdmissionEstimate(shown.view)
    shown.show(2, num_tokens=90)
    assert failure(estimate, 1, 10) is None
    assert failure(estimate, 1, 11) is not None


def test_prompts_of_more_than_the_bound_by_themselves_pass_an_empty_queue() -> None:
    estimate = AdmissionEstimate(PublishedBoard(EPOCH).view)
    assert failure(estimate, 10, 1000) is None


@pytest.mark.parametrize("num_waiting", [0, 9])
def test_more_outputs_than_the_queue_has_places_are_rejected_for_good(num_waiting: int) -> None:
    shown = PublishedBoard(EPOCH)
    estimate = AdmissionEstimate(shown.view)
    shown.show(num_waiting, queue_s=2.5)
    error = failure(estimate, 11)
    assert error is not None
    assert error.reason is ErrorReason.INVALID_ARGUMENT
    assert error.failure.retry_after_s is None
    assert [each.path for each in error.failure.violations] == ["sampling.num_outputs"]


def test_sent_requests_count_until_the_engine_publishes_them() -> None:
    shown = PublishedBoard(EPOCH)
    estimate = AdmissionEstimate(shown.view)
    for _ in range(10):
        assert failure(estimate) is None
        estimate.note_sent(1, 5)
    assert failure(estimate) is not None
    shown.show(0)
    assert failure(estimate) is not None, "that turn had begun before"
    shown.show(9)
    assert failure(estimate) is None
    estimate.note_sent(1, 5)
    assert failure(estimate) is not None


def test_requests_sent_to_an_earlier_engine_do_not_count() -> None:
    shown = PublishedBoard(EPOCH)
    estimate = AdmissionEstimate(shown.view)
    estimate.note_sent(10, 50)
    assert failure(estimate) is not None
    shown.restart(EPOCH)
    assert failure(estimate) is None


@pytest.mark.parametrize("epoch", [2, 4])
def test_a_queue_that_another_engine_published_is_ignored(epoch: int) -> None:
    shown = PublishedBoard(epoch)
    estimate = AdmissionEstimate(shown.view)
    shown.show(10)
    assert failure(estimate) is None


def test_without_a_published_queue_nothing_is_rejected() -> None:
    estimate = AdmissionEstimate()
    estimate.note_sent(1000, 1000)
    assert failure(estimate, 1000) is None


def test_the_last_places_are_shared_by_the_fronts() -> None:
    shown, waiting = PublishedBoard(EPOCH), WaitingRequests()
    waiting.add("", 20)
    estimate = AdmissionEstimate(shown.view, num_fronts=4, waiting=waiting)
    wide = msgspec.structs.replace(HELLO, max_num_waiting=100)
    shown.show(60)
    estimate.check(wide, 40)
    shown.show(91)
    estimate.check(wide, 2)
    with pytest.raises(RequestError):
        estimate.check(wide, 3)
    shown.show(97)
    with pytest.raises(RequestError):
        estimate.check(wide, 1)


def test_a_short_queue_is_used_to_its_last_place() -> None:
    shown = PublishedBoard(EPOCH)
    estimate = AdmissionEstimate(shown.view, num_fronts=4)
    shown.show(9)
    assert failure(estimate) is None


def test_a_withdrawn_request_frees_its_place_before_the_engine_publishes_it() -> None:
    shown = PublishedBoard(EPOCH)
    estimate = AdmissionEstimate(shown.view)
    shown.show(10)
    assert failure(estimate) is not None
    estimate.note_sent(-2, -20)
    assert failure(estimate, 2) is None
    assert failure(estimate, 3) is not None
    estimate.note_sent(-8, -80)
    assert failure(estimate, 10, num_tokens=500) is None


class WaitingRequests:
    """Live requests of a front, none of which has a running output."""

    def __init__(self) -> None:
        self.requests: list[LiveRequest] = []

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self.requests)

    def add(self, tenant: str, count: int, priority: int = 0) -> None:
        for number in range(count):
            urgency = Urgency(priority=priority)
            made = structs.replace(generation(), tenant=tenant, urgency=urgency)
            request = LiveRequest(f"{tenant}-{number}", made, arrival_s=0.0)
            output: Any = SimpleNamespace(is_live=True, is_running=False)
            request.outputs = (output,)
            self.requests.append(request)


def passes(estimate: AdmissionEstimate, tenant: str, priority: int = 0) -> bool:
    try:
        estimate.check(HELLO, 1, tenant=tenant, priority=priority)
    except RequestError:
        return False
    return True


def test_a_full_queue_is_open_to_a_tenant_with_a_smaller_part() -> None:
    shown, waiting = PublishedBoard(EPOCH), WaitingRequests()
    waiting.add("flood", 7)
    waiting.add("quiet", 3)
    estimate = AdmissionEstimate(shown.view, waiting=waiting)
    shown.show(10)

    assert not passes(estimate, "flood")
    # What passed in this turn of the engine counts: after three more the parts are equal.
    assert [passes(estimate, "quiet") for _ in range(4)] == [True, True, True, False]
    assert passes(estimate, "new")


def test_parts_go_by_weight() -> None:
    shown, waiting = PublishedBoard(EPOCH), WaitingRequests()
    waiting.add("light", 4)
    waiting.add("heavy", 6)
    estimate = AdmissionEstimate(
        shown.view, waiting=waiting, weight_of=lambda name: 3.0 if name == "heavy" else 1.0
    )
    shown.show(10)

    assert passes(estimate, "heavy")
    assert not passes(estimate, "light")


def test_a_full_queue_is_open_to_a_higher_class_of_the_same_tenant() -> None:
    shown, waiting = PublishedBoard(EPOCH), WaitingRequests()
    waiting.add("", 5, priority=1)
    waiting.add("", 5, priority=3)
    estimate = AdmissionEstimate(shown.view, waiting=waiting)
    shown.show(10)

    assert not passes(estimate, "", priority=1)
    assert passes(estimate, "", priority=2)


def test_a_small_part_passes_where_the_largest_may_be_at_another_front() -> None:
    shown, waiting = PublishedBoard(EPOCH), WaitingRequests()
    waiting.add("quiet", 1)
    estimate = AdmissionEstimate(shown.view, num_fronts=2, waiting=waiting)
    shown.show(10)

    # Of ten places a quarter is two; what passes counts.
    assert [passes(estimate, "quiet") for _ in range(2)] == [True, False]
