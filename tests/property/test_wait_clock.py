"""The queue's accounting of waits compared with a plain sum over every request and second.

The order of events is drawn, and any request may be admitted next. The clock's columns are small at
first, so that they grow often.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler import wait_clock
from penstock.scheduler.events import Wait, WaitReason
from penstock.scheduler.request import Request, RequestSpec
from penstock.scheduler.wait_clock import WaitClock

NUM_TURNS = 120


@dataclass(slots=True)
class Account:
    """One wait in the queue: its seconds by reason, and how many later requests passed it."""

    since_s: float
    spent_s: dict[WaitReason | None, float] = field(default_factory=dict)
    num_passed_by: int = 0


@dataclass(slots=True)
class Turn:
    """The last admission, if it was by fair share. `line`: priority class and tenant of the
    admitted request. `first`: the lowest sequence among that tenant's requests in the class that
    waited at the admission, including the admitted one, or were preempted since.

    Until the next admission, the wait of a request of another tenant in the class counts as
    FAIRNESS if the request's sequence is lower than `first`.
    """

    line: tuple[int, int]
    first: int


class Queue:
    """A wait clock, and the accounts of the waiting requests, computed without optimisation."""

    def __init__(self) -> None:
        self.clock = WaitClock()
        self.now_s = 10.0
        self.reason: WaitReason | None = None
        self.turn: Turn | None = None
        self.live: dict[int, Request] = {}
        self.waiting: dict[int, Account] = {}
        self.num_arrived = 0

    def reason_of(self, request: Request) -> WaitReason | None:
        line, turn = (request.spec.priority, request.tenant), self.turn
        if turn is None or self.reason is None:
            return self.reason
        is_other = line[0] == turn.line[0] and line[1] != turn.line[1]
        is_fairness = is_other and request.sequence < turn.first
        return WaitReason.FAIRNESS if is_fairness else self.reason

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for key, account in self.waiting.items():
            reason = self.reason_of(self.live[key])
            account.spent_s[reason] = account.spent_s.get(reason, 0.0) + seconds

    def report(self, reason: WaitReason | None) -> None:
        self.reason = reason
        self.clock.note_reason(reason, self.now_s)

    def arrive(self, priority: int, tenant: int) -> None:
        self.num_arrived += 1
        spec = RequestSpec(
            key=self.num_arrived,
            request_id=str(self.num_arrived),
            prompt_ids=np.zeros(1, dtype=np.int32),
            max_tokens=1,
            priority=priority,
        )
        request = Request(
            spec=spec, sequence=self.num_arrived, tokens=spec.prompt_ids, block_hashes=[]
        )
        request.tenant = tenant
        self.live[spec.key] = request
        self.begin(request)

    def begin(self, request: Request) -> None:
        self.clock.join(request, self.now_s)
        self.waiting[request.spec.key] = Account(self.now_s)

    def preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.begin(request)
        line = (request.spec.priority, request.tenant)
        if self.turn is not None and self.turn.line == line:
            self.turn.first = min(self.turn.first, request.sequence)

    def admit(self, request: Request, *, is_by_tenant: bool) -> None:
        line = (request.spec.priority, request.tenant)
        lined_up = [one for one in self.of_class(line[0]) if one.tenant == line[1]]
        eldest = min(lined_up, key=lambda one: one.sequence)
        has_rivals = len(lined_up) < len(self.of_class(line[0]))
        reported = eldest if is_by_tenant and has_rivals else None
        wait = self.clock.admit(request, reported, self.now_s)
        self.check(request, wait)
        self.turn = None if reported is None else Turn(line, reported.sequence)
        for key, account in self.waiting.items():
            account.num_passed_by += self.live[key].sequence < request.sequence

    def of_class(self, priority: int) -> list[Request]:
        return [self.live[key] for key in self.waiting if self.live[key].spec.priority == priority]

    def leave(self, request: Request) -> None:
        self.check(request, self.clock.leave(request, self.now_s))
        del self.live[request.spec.key]

    def check(self, request: Request, wait: Wait) -> None:
        account = self.waiting.pop(request.spec.key)
        reported = {
            WaitReason.BLOCKS: wait.blocks_s,
            WaitReason.SLOTS: wait.slots_s,
            WaitReason.TOKEN_BUDGET: wait.token_budget_s,
            WaitReason.FAIRNESS: wait.fairness_s,
            None: wait.other_s,
        }
        for reason, seconds in reported.items():
            assert seconds >= 0.0
            assert seconds == pytest.approx(account.spent_s.get(reason, 0.0), abs=1e-6)
        assert sum(reported.values()) == pytest.approx(self.now_s - account.since_s, abs=1e-6)
        assert wait.num_passed_by == account.num_passed_by

    def play(self, random: Random) -> None:
        waiting = [self.live[key] for key in self.waiting]
        running = [one for one in self.live.values() if one.spec.key not in self.waiting]
        match random.randrange(8):
            case 0:
                self.report(random.choice([None, *WaitReason]))
            case 1 if running:
                self.preempt(random.choice(running))
            case 2 if running:
                del self.live[random.choice(running).spec.key]
            case 3 if waiting:
                self.leave(random.choice(waiting))
            case 4 | 5 if waiting:
                self.admit(random.choice(waiting), is_by_tenant=random.random() < 0.8)
            case _:
                self.arrive(random.randrange(2), random.randrange(3))


@given(st.randoms(use_true_random=False))
def test_every_second_of_a_wait_is_attributed_to_its_reason(random: Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The columns soon grow.
        patch.setattr(wait_clock, "FIRST_CAPACITY", 4)
        queue = Queue()
        for _ in range(NUM_TURNS):
            queue.play(random)
            for request in (queue.live[key] for key in queue.waiting):
                assert queue.clock.reason_of(request) is queue.reason_of(request)
            queue.pass_time(random.choice([0.0, 0.001, 0.5, 3.0]))
        for key in list(queue.waiting):
            queue.leave(queue.live[key])
