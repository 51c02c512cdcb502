"""Who gets a request that several want, that is on its way, or of which not all have spoken."""

from __future__ import annotations

import pytest

from penstock.server.link.hand_over import MAX_CLAIMS, MAX_WAIT_S, HandOvers, Mail
from penstock.server.link.orphanage import Orphanage
from penstock.server.link.resume_frames import (
    Ask,
    Claim,
    ClaimAnswer,
    Gone,
    Inheritance,
    Keep,
    Keepsake,
    Lack,
    Settle,
    ToldLog,
)


class Site:
    """The engine's side, on a clock that the test moves."""

    def __init__(self, num_fronts: int = 0) -> None:
        self.now_s = 10.0
        self.orphanage = Orphanage(lambda: self.now_s, can_repeat=True)
        self.claims = HandOvers(
            self.orphanage, lambda _: None, num_fronts=num_fronts, clock=lambda: self.now_s
        )

    def ask(self, front_id: int, *fronts: int, ticket: int = 1) -> Mail:
        return self.claims.claim(front_id, Claim(ticket=ticket, name="r"), fronts)


def kept(num_messages: int = 0, *, is_spare: bool = False) -> Inheritance:
    keepsake = Keepsake(
        request_id="r", seed=1, arrival_s=0.0, deadline_s=1e9, grace_s=60.0, message=b"m"
    )
    log = ToldLog(first_sequence=0, messages=(b"x",) * num_messages, is_ended=False)
    return Inheritance(keepsake=keepsake, log=log, is_spare=is_spare)


def asked(mail: Mail) -> dict[int, int]:
    """Who is asked, with which ticket."""
    return {front_id: frame.ticket for front_id, frame in mail if isinstance(frame, Ask)}


def answers(mail: Mail) -> list[tuple[int, Inheritance | Lack]]:
    """Who is answered what."""
    return [
        (front_id, frame.inheritance or frame.lack)
        for front_id, frame in mail
        if isinstance(frame, ClaimAnswer)
    ]


def test_a_second_claim_waits_until_the_first_has_settled_and_asks_the_winner() -> None:
    site, given = Site(), kept()
    first = asked(site.ask(1, 1, 2, 3))
    assert site.ask(3, 1, 2, 3, ticket=5) == []
    assert answers(site.claims.given(2, first[2], given)) == [(1, given)]
    assert site.claims.given(3, first[3], None) == [], "it was answered"
    mail = site.claims.settle(1, Settle(ticket=1, is_taken=True))
    assert [(to, frame) for to, frame in mail if isinstance(frame, Gone)] == [
        (2, Gone(name="r")),
        (3, Gone(name="r")),
    ]
    second = asked(mail)
    assert set(second) == {1, 2}, "the winner is asked too"
    assert answers(site.claims.given(1, second[1], given)) == [(3, given)]


def test_an_answer_whose_front_goes_is_not_lost() -> None:
    site, given = Site(), kept()
    tickets = asked(site.ask(1, 1, 2))
    site.claims.given(2, tickets[2], given)
    site.ask(2, 1, 2, ticket=5)
    assert answers(site.claims.front_gone(1)) == [(2, given)], "who has waited gets it"


def test_what_a_front_made_of_its_answer_is_newer() -> None:
    site = Site()
    tickets = asked(site.ask(1, 1, 2))
    site.claims.given(2, tickets[2], kept())
    newer = kept(5)
    site.orphanage.take_in("r", newer)  # as the engine does with what a front had, when it goes
    site.claims.front_gone(1)
    assert site.orphanage.take("r") is newer


def test_an_answer_that_was_not_taken_waits_for_who_asks_better() -> None:
    site, given = Site(), kept()
    tickets = asked(site.ask(1, 1, 2))
    site.claims.given(2, tickets[2], given)
    assert site.claims.settle(1, Settle(ticket=1, is_taken=False)) == []
    assert answers(site.ask(1, 1, 2, ticket=2)) == [(1, given)]


def test_whoever_has_the_request_itself_goes_before_copies_and_newer_before_older() -> None:
    site = Site()
    tickets = asked(site.ask(1, 1, 2, 3, 4))
    old, new = kept(2, is_spare=True), kept(7, is_spare=True)
    assert site.claims.given(2, tickets[2], new) == []
    assert site.claims.given(3, tickets[3], old) == []
    assert answers(site.claims.given(4, tickets[4], None)) == [(1, new)]
    site.claims.settle(1, Settle(ticket=1, is_taken=True))
    tickets = asked(site.ask(1, 1, 2, 3, ticket=2))
    assert site.claims.given(2, tickets[2], new) == []
    real = kept()
    assert answers(site.claims.given(3, tickets[3], real)) == [(1, real)]


def test_nobody_has_it_only_when_all_have_said_so() -> None:
    site = Site(num_fronts=3)
    tickets = asked(site.ask(1, 1, 2))
    assert site.claims.given(2, tickets[2], None) == [], "one is not there yet"
    tickets = asked(site.claims.front_came(3))
    assert answers(site.claims.given(3, tickets[3], None)) == [(1, Lack.NOT_THERE)]
    site.ask(1, 1, 2, ticket=2)
    site.now_s += MAX_WAIT_S
    assert answers(site.claims.sweep()) == [(1, Lack.UNSURE)]
    assert len(site.claims) == 0


def test_a_front_that_cannot_say_makes_it_unsure() -> None:
    site = Site()
    tickets = asked(site.ask(1, 1, 2))
    assert answers(site.claims.given(2, tickets[2], None, Lack.UNSURE)) == [(1, Lack.UNSURE)]


def test_a_front_that_does_not_answer_holds_nobody_up() -> None:
    site = Site()
    tickets = asked(site.ask(1, 1, 2, 3))
    site.ask(3, 1, 2, 3, ticket=5)
    site.now_s += MAX_WAIT_S / 2
    assert site.claims.sweep() == []
    site.now_s += MAX_WAIT_S
    assert sorted(answers(site.claims.sweep())) == [(1, Lack.UNSURE), (3, Lack.UNSURE)]
    assert len(site.claims) == 0
    assert site.claims.given(2, tickets[2], kept()) == [], "it has its copy"


def test_who_waits_behind_an_answer_that_is_not_settled_is_told_in_time() -> None:
    site = Site()
    tickets = asked(site.ask(1, 1, 2))
    site.claims.given(2, tickets[2], kept())
    site.ask(2, 1, 2, ticket=5)
    site.now_s += MAX_WAIT_S
    assert answers(site.claims.sweep()) == [(2, Lack.UNSURE)]
    assert len(site.claims) == 1, "the first has it, and will say so"


def test_too_many_claims_are_told_so() -> None:
    site = Site()
    for number in range(MAX_CLAIMS):
        site.claims.claim(1, Claim(ticket=number, name=f"r{number % 2000}"), [1, 2])
    assert answers(site.ask(1, 1, 2)) == [(1, Lack.TOO_MANY)]
    site.now_s += MAX_WAIT_S
    site.claims.sweep()
    assert len(site.claims) == 0
    assert asked(site.ask(1, 1, 2))


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_front_that_was_away_does_not_get_it_back(is_settled: bool) -> None:
    site = Site()
    keep = Keep(name="r", keys=((0, 7),), keepsake=kept().keepsake)
    tickets = asked(site.ask(1, 1, 2))
    assert not site.claims.is_elsewhere(2, keep)
    site.claims.given(2, tickets[2], kept())
    if is_settled:
        site.orphanage.keep(1, keep)
        site.claims.settle(1, Settle(ticket=1, is_taken=True))
    assert site.claims.is_elsewhere(2, keep)
    assert not site.claims.is_elsewhere(1, keep)


def test_settling_what_was_never_answered_does_nothing() -> None:
    site = Site()
    assert site.claims.settle(1, Settle(ticket=1, is_taken=True)) == []
    site.ask(1, 1, 2)
    assert site.claims.settle(1, Settle(ticket=1, is_taken=True)) == []
    assert len(site.claims) == 1
