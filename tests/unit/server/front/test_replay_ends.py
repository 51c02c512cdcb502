"""The ends of requests that wait for an engine, or that the next engine cannot continue."""

from __future__ import annotations

import pytest

from penstock.scheduler.events import Failed
from penstock.scheduler.request import (
    FailureReason,
    FinishReason,
)
from penstock.scheduler.state import RequestState
from penstock.server.front.errors import ErrorReason
from penstock.server.front.events import (
    Finished,
)
from penstock.server.front.generation import (
    Stopping,
    Urgency,
)
from penstock.server.front.submission import CallTimes
from penstock.server.text.model_text import ModelText
from support.fronts import rejected
from support.replay_harness import (
    A,
    B,
    C,
    D,
    ReplayHarness,
    constrained,
    end_of,
    generation,
    rejection_of,
    text_in,
)


@pytest.mark.parametrize(
    ("urgency", "reason", "kind"),
    [
        (Urgency(ttft_deadline_s=0.02), ErrorReason.DEADLINE_EXCEEDED, "ttft"),
        (Urgency(total_deadline_s=0.02), ErrorReason.DEADLINE_EXCEEDED, "total"),
        (Urgency(), ErrorReason.ENGINE_DOWN, None),
    ],
)
async def test_a_deadline_fails_a_request_that_waits_for_an_engine(
    text: ModelText, urgency: Urgency, reason: ErrorReason, kind: str | None
) -> None:
    site = ReplayHarness(text, max_replay_wait_s=0.02)
    request, _ = await site.open(generation(urgency=urgency))
    site.port.go_down()
    site.now_s += 0.03  # the timer runs in real time and reads this clock
    error = await rejection_of(request)
    assert error.reason is reason
    assert error.failure.metadata.get("deadline") == kind


async def test_a_time_limit_completes_a_request_that_waits_for_an_engine(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation(urgency=Urgency(time_limit_s=0.02)))
    site.run(first.key)
    site.tokens((first.key, A))
    site.port.go_down()
    site.now_s += 0.03
    events = await end_of(request)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert [end.reason for end in finished.outputs] == [FinishReason.TIME_LIMIT]
    assert text_in(events) == text.tokenizer.decode([A])


async def test_cancel_while_no_engine_is_there(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, _ = await site.open(generation(2))
    site.port.go_down()
    assert await site.front.cancel("r") is RequestState.PENDING
    finished = (await end_of(request))[-1]
    assert isinstance(finished, Finished)
    assert [end.reason for end in finished.outputs] == [FinishReason.CANCELLED] * 2
    site.front.release(request)
    site.come_up()
    assert len(site.front.replays) == 0


async def test_requests_cancelled_before_the_death_are_not_replayed(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation())
    site.run(first.key)
    assert await site.front.cancel("r") is RequestState.PROCESSING
    site.port.go_down()
    finished = (await end_of(request))[-1]
    assert isinstance(finished, Finished)
    assert finished.outputs[0].reason is FinishReason.CANCELLED


async def test_a_disconnected_request_is_not_replayed(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, _ = await site.open(generation())
    other, [second] = await site.open(generation(request_id="other"))
    site.port.go_down()
    site.front.release(request)
    site.come_up()
    [again] = await site.port.next_submission()
    assert again.key == second.key
    assert other.num_replays == 1
    assert len(site.front.replays) == 0


async def test_a_request_is_replayed_a_limited_number_of_times(text: ModelText) -> None:
    site = ReplayHarness(text, max_replays=2)
    request, _ = await site.open(generation())
    for num_replays in (1, 2):
        [again] = await site.replace_engine()
        assert again.num_replays == num_replays
    site.port.go_down()
    assert (await rejection_of(request)).reason is ErrorReason.ENGINE_DOWN


async def test_without_replays_a_request_ends_with_its_engine(text: ModelText) -> None:
    site = ReplayHarness(text, max_replays=0)
    request, _ = await site.open(generation())
    site.port.go_down()
    assert (await rejection_of(request)).reason is ErrorReason.ENGINE_DOWN


async def test_if_no_engine_will_start_no_request_waits(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, _ = await site.open(generation())
    site.port.go_down()
    site.front.on_no_further_engine()
    assert (await rejection_of(request)).reason is ErrorReason.ENGINE_DOWN
    with rejected(ErrorReason.ENGINE_DOWN):
        await site.front.open(generation(request_id="new"), CallTimes(arrival_s=site.now_s))


async def test_new_requests_are_rejected_while_no_engine_is_there(text: ModelText) -> None:
    site = ReplayHarness(text)
    site.port.go_down()
    with rejected(ErrorReason.ENGINE_DOWN):
        await site.front.open(generation(), CallTimes(arrival_s=site.now_s))
    assert len(site.front.table) == 0


async def test_a_replay_that_generates_another_token_fails(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, again = await constrained(site)
    site.tokens((again.key, A))
    site.tokens((again.key, C))
    assert (await rejection_of(request)).reason is ErrorReason.ENGINE_DOWN


async def test_a_replay_that_ends_before_the_sent_output_fails(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, again = await constrained(site)
    site.tokens((again.key, A))
    site.port.finish(again.key, FinishReason.STOP)
    assert (await rejection_of(request)).reason is ErrorReason.ENGINE_DOWN


async def test_a_replay_that_the_next_engine_cannot_hold_is_rejected(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation())
    await site.replace_engine()
    site.port.fail(first.key, FailureReason.EXCEEDS_KV_CACHE)
    error = await rejection_of(request)
    assert error.reason is ErrorReason.EXCEEDS_KV_CACHE
    assert error.failure.violations


async def test_an_end_lost_with_the_engine_is_derived_from_the_tokens(text: ModelText) -> None:
    """The front has received the last token but not the final event, so nothing is left to
    generate.
    """
    site = ReplayHarness(text)
    stopping = Stopping(max_tokens=2, ignore_eos=True, stop_token_ids=(D,))
    request, [first] = await site.open(generation(stopping=stopping))
    other, [second] = await site.open(generation(request_id="other", stopping=stopping))
    site.run(first.key, second.key)
    site.tokens((first.key, A), (second.key, D))
    site.tokens((first.key, B))
    site.port.go_down()
    site.come_up()
    assert len(site.front.replays) == 0
    for one, reason in ((request, FinishReason.LENGTH), (other, FinishReason.STOP)):
        finished = (await end_of(one))[-1]
        assert isinstance(finished, Finished)
        assert [end.reason for end in finished.outputs] == [reason]


async def test_a_failure_in_the_next_engine_is_reported_like_any(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation())
    await site.replace_engine()
    reason = FailureReason.EXECUTOR_REQUEST_FAILED
    site.port.emit(ends=[Failed(key=first.key, at_s=site.now_s, reason=reason)])
    assert (await rejection_of(request)).reason is ErrorReason.EXECUTOR_REQUEST_FAILED
