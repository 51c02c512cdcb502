"""When a client resumes a broken stream, from which point, and when it reports the loss."""

import grpc
import pytest

from penstock.client import (
    Accepted,
    Draining,
    EngineDown,
    InvalidArgument,
    PenstockError,
    RequestNotFound,
    ResumePoint,
    StreamBroken,
    Tokens,
    Unavailable,
)
from penstock.client.errors import Failure
from penstock.client.resuming import Recovery
from support.core import FakeClock


def failed(kind: type[PenstockError], retry_after_s: float | None = None) -> PenstockError:
    code = grpc.StatusCode.UNAVAILABLE
    return kind(Failure(code=code, message="", retry_after_s=retry_after_s))


def recovery(resume_timeout_s: float = 10.0) -> tuple[Recovery, FakeClock]:
    clock = FakeClock(1.0)
    return Recovery(resume_timeout_s, clock=clock, random=lambda: 1.0), clock


@pytest.mark.parametrize(
    ("kind", "is_resumed"),
    [
        (Unavailable, True),
        (Draining, True),
        (StreamBroken, True),
        (EngineDown, False),
        (InvalidArgument, False),
    ],
)
def test_only_a_lost_stream_is_resumed(kind: type[PenstockError], is_resumed: bool) -> None:
    account, _ = recovery()
    delay_s = account.delay_after(failed(kind), request_id="r", next_sequence=4)
    assert (delay_s is not None) is account.is_resuming is is_resumed


def test_a_request_that_was_never_accepted_has_nothing_to_resume() -> None:
    account, _ = recovery()
    assert account.delay_after(failed(Unavailable), request_id="", next_sequence=0) is None
    account, _ = recovery(resume_timeout_s=0.0)
    assert account.delay_after(failed(Unavailable), request_id="r", next_sequence=4) is None


def test_delays_grow_until_the_resume_timeout_and_begin_again_with_the_next_loss() -> None:
    account, clock = recovery(resume_timeout_s=2.0)
    delays: list[float] = []
    error = failed(Unavailable)
    while (delay_s := account.delay_after(error, request_id="r", next_sequence=4)) is not None:
        delays.append(delay_s)
        clock.now_s += delay_s
    assert delays == sorted(delays)
    assert sum(delays) <= 2.0 < sum(delays) + 1.0
    assert not account.is_resuming
    assert account.delay_after(error, request_id="r", next_sequence=5) == delays[0]


def test_the_server_sets_how_long_to_wait() -> None:
    account, _ = recovery()
    error = failed(Draining, retry_after_s=3.0)
    assert account.delay_after(error, request_id="r", next_sequence=4) == 3.0


def test_a_request_that_is_not_known_any_more_was_lost_before() -> None:
    account, _ = recovery()
    loss, unknown = failed(Unavailable), failed(RequestNotFound)
    assert account.explain(unknown) is unknown
    account.delay_after(loss, request_id="r", next_sequence=4)
    assert account.explain(unknown) is loss


def test_a_point_counts_messages_and_tokens() -> None:
    point = ResumePoint(request_id="")
    accepted = Accepted(
        sequence=0, request_id="r", model="m", num_prompt_tokens=1, seed=0, estimated_queue_s=None
    )
    tokens = Tokens(sequence=1, output_index=2, text="x", records=(), num_tokens=3)
    point = point.after(accepted).after(tokens)
    assert point == ResumePoint(request_id="r", next_sequence=2, received_token_counts=(0, 0, 3))
    assert list(point.message().received_token_counts) == [0, 0, 3]


@pytest.mark.parametrize("fields", [{"next_sequence": -1}, {"received_token_counts": (1, -1)}])
def test_a_point_out_of_range_is_named(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ResumePoint(request_id="r", **fields)  # type: ignore[arg-type]


def test_without_an_engine_to_ask_over_it_is_tried_again_within_the_resume_timeout() -> None:
    account, clock = recovery(resume_timeout_s=2.0)
    assert account.delay_after(failed(Unavailable), request_id="r", next_sequence=4) is not None
    down = failed(EngineDown, retry_after_s=0.5)
    assert account.delay_after(down, request_id="r", next_sequence=4) == 0.5
    clock.now_s += 2.0
    assert account.delay_after(down, request_id="r", next_sequence=4) is None


def test_a_stream_that_continued_and_lost_its_engines_receives_the_reason() -> None:
    account, _ = recovery()
    account.delay_after(failed(Unavailable), request_id="r", next_sequence=4)
    assert account.delay_after(failed(EngineDown), request_id="r", next_sequence=9) is None


def test_a_stream_that_begins_with_a_resume_is_tried_again_too() -> None:
    account, _ = recovery()
    account.begin_at(4)
    assert account.delay_after(failed(EngineDown), request_id="r", next_sequence=4) is not None
