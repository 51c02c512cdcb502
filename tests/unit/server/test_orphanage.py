"""What an engine keeps of requests without a front, and who gets it."""

import numpy as np
import pytest

from penstock.server.link.frames import decode, encode
from penstock.server.link.hand_over import HandOvers, Mail
from penstock.server.link.orphanage import Orphanage
from penstock.server.link.resume_frames import (
    Ask,
    Claim,
    ClaimAnswer,
    Give,
    Gone,
    Inheritance,
    Keep,
    Keepsake,
    Lack,
    Settle,
    ToldLog,
)
from penstock.server.link.wire import FrameBuffer

SECRET = b"a prompt that nobody may see"


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def keep(name: str = "r", *keys: int, grace_s: float = 5.0, message: bytes = SECRET) -> Keep:
    keepsake = Keepsake(
        request_id=name,
        seed=2**64 - 1,
        arrival_s=1.5,
        deadline_s=float("inf"),
        grace_s=grace_s,
        message=message,
    )
    return Keep(name=name, keys=tuple(enumerate(keys or (1,))), keepsake=keepsake)


def some_tokens(key: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(key, dtype=np.int32)


def ticket_of(mail: Mail) -> int:
    """Of the question that is asked first."""
    ask = mail[0][1]
    assert isinstance(ask, Ask)
    return ask.ticket


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_a_front_had_waits_for_its_grace(clock: Clock) -> None:
    orphanage = Orphanage(clock, can_repeat=True)
    orphanage.keep(7, keep("r", 3, 4))
    orphanage.keep(8, keep("s", 5))
    assert orphanage.take("r") is None, "its front is there"
    assert orphanage.front_gone(7, some_tokens) == 1
    assert orphanage.num_bytes > len(SECRET)
    taken = orphanage.take("r")
    assert taken is not None
    assert [(index, ids.tolist()) for index, ids in taken.tokens] == [
        (0, [0, 1, 2]),
        (1, [0, 1, 2, 3]),
    ]
    assert orphanage.take("r") is None, "it is given once"
    orphanage.front_gone(8, some_tokens)
    clock.now_s += 5.0
    assert orphanage.take("s") is None
    orphanage.sweep()
    assert (len(orphanage), orphanage.num_bytes) == (0, 0)


@pytest.mark.parametrize("can_repeat", [True, False])
def test_an_end_that_was_not_told_is_generated_again_where_that_is_the_same(
    clock: Clock, can_repeat: bool
) -> None:
    orphanage = Orphanage(clock, can_repeat=can_repeat)
    orphanage.keep(7, keep("r", 3, 4))
    orphanage.ended(3, is_well=True)
    orphanage.ended(4, is_well=True)
    orphanage.front_gone(7, some_tokens)
    taken = orphanage.take("r")
    assert (taken is not None) is can_repeat
    assert taken is None or taken.tokens == ()


def test_who_was_cancelled_or_failed_is_forgotten(clock: Clock) -> None:
    orphanage = Orphanage(clock, can_repeat=True)
    orphanage.keep(7, keep("r", 3, 4))
    orphanage.ended(3, is_well=False)
    assert orphanage.front_gone(7, some_tokens) == 0


def test_it_is_bounded(clock: Clock) -> None:
    orphanage = Orphanage(clock, can_repeat=True, max_bytes=10_000, max_num=5)
    for number in range(1, 20):
        orphanage.keep(7, keep(f"r{number}", number, message=bytes(3000)))
    orphanage.front_gone(7, some_tokens)
    assert len(orphanage) == 2
    assert orphanage.num_bytes <= 10_000
    assert orphanage.take("r19") is not None, "the oldest go"


def test_claims_are_answered_by_who_has_it(clock: Clock) -> None:
    orphanage = Orphanage(clock, can_repeat=True)
    cancelled: list[str] = []
    claims = HandOvers(orphanage, cancelled.append)
    claim = Claim(ticket=9, name="r")
    given = Inheritance(keepsake=keep().keepsake)

    asked = claims.claim(1, claim, [1, 2, 3])
    assert [(front, type(frame)) for front, frame in asked] == [(2, Ask), (3, Ask)]
    ticket = ticket_of(asked)
    assert claims.given(2, ticket, None) == []
    ((front, answer),) = claims.given(3, ticket, given)
    assert isinstance(answer, ClaimAnswer)
    assert (front, answer.ticket) == (1, 9)
    assert answer.inheritance is given
    assert cancelled == ["r"]
    assert claims.settle(1, Settle(ticket=9, is_taken=True)) == [
        (2, Gone(name="r")),
        (3, Gone(name="r")),
    ]
    assert len(claims) == 0

    asked = claims.claim(1, claim, [1, 2])
    orphanage.keep(2, keep())
    orphanage.front_gone(2, some_tokens)
    ((front, answer),) = claims.front_gone(2)
    assert front == 1
    assert isinstance(answer, ClaimAnswer)
    assert answer.inheritance is not None, "a front that goes leaves what it had"


def test_what_comes_for_a_front_that_is_gone_is_kept(clock: Clock) -> None:
    orphanage = Orphanage(clock, can_repeat=True)
    claims = HandOvers(orphanage, lambda _: None)
    ticket = ticket_of(claims.claim(1, Claim(ticket=9, name="r"), [1, 2]))
    claims.front_gone(1)
    given = Inheritance(keepsake=keep().keepsake)
    assert claims.given(2, ticket, given) == []
    assert orphanage.take("r") is given


def test_frames_come_back_and_show_nothing() -> None:
    log = ToldLog(
        first_sequence=3,
        messages=(SECRET, b""),
        is_ended=True,
        refusal="{}",
        num_prompt_records=2,
        ended_outputs=(1,),
    )
    given = Inheritance(
        keepsake=keep().keepsake, tokens=((0, some_tokens(3)), (2, some_tokens(0))), log=log
    )
    for frame in (
        keep("n", 3, 2**62),
        Claim(ticket=2**32 - 1, name="n"),
        Ask(ticket=1, name="n"),
        Give(ticket=1, inheritance=given),
        Give(ticket=1, inheritance=None),
        ClaimAnswer(ticket=2, inheritance=given),
        ClaimAnswer(ticket=2, inheritance=None, lack=Lack.UNSURE),
        Settle(ticket=2**32 - 1, is_taken=True),
        Gone(name="n"),
    ):
        (body,) = FrameBuffer().feed(encode(frame))
        again = decode(body)
        assert encode(again) == encode(frame)
        assert type(again) is type(frame)
        assert SECRET.decode() not in repr(again)
