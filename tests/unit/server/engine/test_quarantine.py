"""Suspected requests run again one at a time, and requests found responsible for a crash are
rejected. Other requests do not wait for them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.scheduler.events import Completed, Failed, StepEvents
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.engine.quarantine import Quarantine, SuspectedRequest

FRONT = 1


def key(number: int) -> int:
    return FRONT << 32 | number


def request(number: int, num_outputs: int = 1) -> tuple[RequestSpec, ...]:
    leader = RequestSpec(
        key=key(number),
        request_id=f"r{number}",
        prompt_ids=np.arange(1, 5, dtype=np.int32),
        max_tokens=9,
        num_replays=1,
    )
    return (
        leader,
        *(
            replace(leader, key=key(number + index), output_index=index, leader_key=leader.key)
            for index in range(1, num_outputs)
        ),
    )


def events(*keys: int, ends: tuple[Completed | Failed, ...] = ()) -> StepEvents:
    return StepEvents(
        step=1,
        at_s=5.0,
        keys=np.array(keys, dtype=np.int64),
        tokens=np.zeros(len(keys), dtype=np.int32),
        ends=ends,
    )


class QuarantineHarness:
    """A quarantine, and the request keys that it published."""

    def __init__(self, *suspects: SuspectedRequest) -> None:
        self.shown: list[tuple[int, ...]] = []
        self.quarantine = Quarantine(suspects, lambda keys: self.shown.append(tuple(keys)))

    def is_due(self) -> bool:
        return self.quarantine.has_work


def tried(*numbers: int, num_tokens: int = 2) -> tuple[SuspectedRequest, ...]:
    return tuple(
        SuspectedRequest(key=key(number), num_probation_tokens=num_tokens) for number in numbers
    )


def test_a_request_that_is_not_suspected_is_not_quarantined() -> None:
    wing = QuarantineHarness(*tried(1))
    assert not wing.quarantine.intercept(FRONT, request(2))
    assert not wing.is_due()
    assert wing.quarantine.next_probation() == ()


def test_suspects_are_admitted_one_at_a_time() -> None:
    wing = QuarantineHarness(*tried(1, 2))
    first, second = request(1), request(2)
    assert wing.quarantine.intercept(FRONT, first)
    assert wing.quarantine.intercept(FRONT, second)
    assert wing.is_due()
    assert wing.quarantine.next_probation() == first
    assert wing.shown == [(key(1),)]
    assert not wing.is_due()
    assert wing.quarantine.next_probation() == ()
    wing.quarantine.with_ends(events(key(1), key(7)))
    assert wing.quarantine.next_probation() == ()
    wing.quarantine.with_ends(events(key(1)))
    assert wing.shown == [(key(1),), ()]
    assert wing.is_due()
    assert wing.quarantine.next_probation() == second


def test_the_end_of_a_request_ends_its_probation() -> None:
    wing = QuarantineHarness(*tried(1, 2))
    for number in (1, 2):
        wing.quarantine.intercept(FRONT, request(number))
    wing.quarantine.next_probation()
    end = Completed(key=key(1), at_s=5.0, reason=FinishReason.STOP)
    updates = events(ends=(end,))
    assert wing.quarantine.with_ends(updates) is updates
    assert [spec.key for spec in wing.quarantine.next_probation()] == [key(2)]


def test_all_outputs_must_pass() -> None:
    wing = QuarantineHarness(*tried(1, 2, num_tokens=1))
    assert wing.quarantine.intercept(FRONT, request(1, num_outputs=2))
    wing.quarantine.next_probation()
    assert wing.shown == [(key(1), key(2))]
    wing.quarantine.with_ends(events(key(1), key(1), key(1)))
    assert wing.shown == [(key(1), key(2))]
    wing.quarantine.with_ends(events(key(2)))
    assert wing.shown[-1] == ()


def test_a_request_found_responsible_is_rejected_without_other_effects() -> None:
    wing = QuarantineHarness(SuspectedRequest(key=key(1), is_poison=True))
    assert wing.quarantine.intercept(FRONT, request(1, num_outputs=2))
    assert wing.is_due()
    assert wing.quarantine.next_probation() == ()
    reported = wing.quarantine.with_ends(events(key(9)))
    ends = [end for end in reported.ends if isinstance(end, Failed)]
    assert [end.key for end in ends] == [key(1), key(2)]
    assert {end.reason for end in ends} == {FailureReason.EXECUTOR_REQUEST_FAILED}
    assert {end.at_s for end in ends} == {5.0}
    assert {end.request_id for end in ends} == {"r1"}
    assert all(end.detail for end in ends)
    assert reported.keys.tolist() == [key(9)]
    assert not wing.is_due()
    assert wing.shown == []


def test_a_quarantined_request_can_be_cancelled() -> None:
    wing = QuarantineHarness(*tried(1, 2, 3))
    wing.quarantine.intercept(FRONT, request(1))
    assert not wing.quarantine.cancel(key(2), FinishReason.CANCELLED)
    assert wing.quarantine.cancel(key(1), FinishReason.CANCELLED)
    assert wing.is_due()
    (end,) = wing.quarantine.with_ends(events()).ends
    assert end == Completed(key=key(1), at_s=5.0, reason=FinishReason.CANCELLED)
    assert wing.quarantine.next_probation() == ()

    wing.quarantine.intercept(FRONT, request(2))
    assert wing.quarantine.cancel_by_id("other") is None
    assert wing.quarantine.cancel_by_id("r2") is RequestState.PENDING
    assert [end.key for end in wing.quarantine.with_ends(events()).ends] == [key(2)]
    assert not wing.is_due()


def test_when_a_leader_is_cancelled_the_next_output_leads() -> None:
    wing = QuarantineHarness(*tried(1))
    wing.quarantine.intercept(FRONT, request(1, num_outputs=3))
    assert wing.quarantine.cancel(key(1), FinishReason.CANCELLED)
    leader, other = wing.quarantine.next_probation()
    assert (leader.key, leader.leader_key) == (key(2), 0)
    assert (other.key, other.leader_key) == (key(3), key(2))


def test_quarantined_requests_of_a_lost_front_are_removed() -> None:
    wing = QuarantineHarness(*tried(1), SuspectedRequest(key=2 << 32 | 1))
    other = (replace(request(1)[0], key=2 << 32 | 1),)
    wing.quarantine.intercept(FRONT, request(1))
    wing.quarantine.intercept(2, other)
    wing.quarantine.front_disconnected(FRONT)
    assert wing.quarantine.next_probation() == other
