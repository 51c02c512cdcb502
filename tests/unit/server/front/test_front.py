"""The front without gRPC: events that arrive while a request is being opened, and the front's live
requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from penstock.scheduler.events import Queued
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.front.events import Accepted, Finished
from penstock.server.front.front import Front
from penstock.server.front.generation import GenerationSpec, Sampling, TextInput, Urgency
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.request_table import RequestTable
from penstock.server.front.submission import CallTimes
from penstock.server.text.model_text import ModelText
from support.fronts import ScriptedPort, admitted, finished, rejected
from support.replay_harness import ReplayHarness, generation

GENERATION = GenerationSpec(
    prompt=TextInput(text="hello"),
    prompt_path="text_prompt.text",
    request_id="r",
    sampling=Sampling(num_outputs=2),
)


class Gate:
    """Replaces a tokenizer's encoding by one that waits until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: ModelText) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        monkeypatch.setattr(text.tokenizer, "encode_async", self._encode)

    async def opened(self, front: Front) -> asyncio.Task[LiveRequest]:
        """Start to open a request; return its task once tokenisation of its prompt has begun."""
        opening = asyncio.create_task(front.open(GENERATION, NOW))
        await self.entered.wait()
        return opening

    async def _encode(self, text: str, **_: object) -> NDArray[np.int32]:
        self.entered.set()
        await self.open.wait()
        return np.array([1, 2, 3], dtype=np.int32)


def make_front(text: ModelText, max_replays: int = 4) -> tuple[Front, ScriptedPort]:
    site = ReplayHarness(text, max_replays=max_replays)
    return site.front, site.port


NOW = CallTimes(arrival_s=1000.0)
"""The time on the clock of `ReplayHarness`."""


async def test_cancel_while_the_prompt_is_tokenised(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, port = make_front(text)
    gate = Gate(monkeypatch, text)
    opening = await gate.opened(front)
    assert await front.cancel("r") is RequestState.PENDING
    assert await front.cancel("r") is RequestState.COMPLETED, "twice is no error"
    gate.open.set()
    request = await opening
    accepted, finished = await request.stream.take()
    assert isinstance(accepted, Accepted)
    assert isinstance(finished, Finished)
    assert [end.reason for end in finished.outputs] == [FinishReason.CANCELLED] * 2
    assert await request.stream.take() == []
    front.release(request)
    assert port.cancelled == []
    assert len(front.table) == 0


async def test_engine_lost_while_the_prompt_is_tokenised(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, port = make_front(text, max_replays=0)
    gate = Gate(monkeypatch, text)
    opening = await gate.opened(front)
    port.go_down()
    port.come_up(epoch=2)
    gate.open.set()
    request = await opening
    with rejected(ErrorReason.ENGINE_DOWN):
        await request.stream.take()
    front.release(request)


async def test_id_is_taken_while_the_prompt_is_tokenised_and_free_afterwards(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _ = make_front(text)
    gate = Gate(monkeypatch, text)
    opening = await gate.opened(front)
    with rejected(ErrorReason.REQUEST_ID_IN_USE):
        await front.open(GENERATION, NOW)
    opening.cancel()
    await asyncio.wait([opening])
    assert len(front.table) == 0


async def test_release_cancels_once_what_still_runs(text: ModelText) -> None:
    front, port = make_front(text)
    request = await front.open(GENERATION, NOW)
    first, second = await port.next_submission()
    port.admit(first.key)
    port.finish(first.key)
    front.release(request)
    front.release(request)
    assert port.cancelled == [((second.key,), FinishReason.CANCELLED)]
    port.finish(second.key)
    assert front.counters.num_late_events == 1
    assert await request.stream.take()


async def test_cancel_reports_the_state_of_the_request(text: ModelText) -> None:
    front, port = make_front(text)
    request = await front.open(GENERATION, NOW)
    first, second = await port.next_submission()
    assert await front.cancel("r") is RequestState.PENDING
    port.admit(first.key)
    assert await front.cancel("r") is RequestState.PROCESSING
    for key in (first.key, second.key):
        port.finish(key, FinishReason.CANCELLED)
    num_cancels = len(port.cancelled)
    assert await front.cancel("r") is RequestState.COMPLETED
    assert len(port.cancelled) == num_cancels, "nothing is left to cancel"
    front.release(request)
    with rejected(ErrorReason.REQUEST_NOT_FOUND):
        await front.cancel("r")


async def test_rejected_request_is_not_cancelled_as_well(text: ModelText) -> None:
    front, port = make_front(text)
    request = await front.open(GENERATION, NOW)
    for spec in await port.next_submission():
        port.fail(spec.key, FailureReason.QUEUE_FULL)
    with pytest.raises(RequestError):
        await request.stream.take()
    assert await front.cancel("r") is RequestState.ERROR
    front.release(request)
    assert port.cancelled == []


async def test_the_newest_place_in_the_queue_is_of_the_engine_that_runs(text: ModelText) -> None:
    front, port = make_front(text)

    def newest() -> Queued | None:
        return front.newest_queue_position

    request = await front.open(GENERATION, NOW)
    first, _ = await port.next_submission()
    assert newest() is None
    place = Queued(key=first.key, at_s=5.0, num_ahead=3, estimated_queue_s=9.9)
    port.emit(changes=[place])
    assert newest() == place
    port.go_down()
    assert newest() is None
    front.release(request)


async def test_deadline_that_has_passed_is_rejected_without_the_engine(text: ModelText) -> None:
    front, port = make_front(text)
    times = CallTimes(arrival_s=1000.0, call_deadline_s=999.0)
    with rejected(ErrorReason.DEADLINE_EXCEEDED):
        await front.open(GENERATION, times)
    assert len(front.table) == 0
    assert port.cancelled == []


async def test_an_engine_lost_at_submission_leaves_no_state(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, port = make_front(text, max_replays=0)
    gate = Gate(monkeypatch, text)
    opening = await gate.opened(front)
    port.is_up = False  # gone, but the front has not received of it yet
    gate.open.set()
    with rejected(ErrorReason.ENGINE_DOWN):
        await opening
    assert len(front.table) == 0


async def test_keys_contain_the_front_id_and_skip_live_ones() -> None:
    table = RequestTable(front_id=3, max_live_requests=1)
    first = table.new_keys(2)
    assert [key >> 32 for key in first] == [3, 3]
    assert len({*first, *table.new_keys(2)}) == 4
    assert all(0 < key < 2**63 for key in RequestTable(2**31 - 1, 1).new_keys(3))


def test_one_tenant_cannot_fill_a_front() -> None:
    table = RequestTable(front_id=1, max_live_requests=16)

    def add(tenant: str, number: int) -> LiveRequest:
        request = LiveRequest(f"{tenant}-{number}", structs.replace(GENERATION, tenant=tenant), 0)
        table.add(request)
        return request

    held = [add("hog", number) for number in range(14)]
    with rejected(ErrorReason.QUEUE_FULL) as caught:
        add("hog", 14)
    assert "max_live_requests is 16, and 14 of them" in caught.value.failure.message
    add("quiet", 0)
    table.remove(held.pop())
    add("hog", 15)
    add("quiet", 1)
    with pytest.raises(RequestError) as caught:
        add("other", 0)
    assert caught.value.failure.message == "the front is full: max_live_requests is 16"


async def test_unread_requests_of_the_tenant_with_most_make_room_in_a_full_front(
    text: ModelText,
) -> None:
    site = ReplayHarness(text, max_live_requests=8)
    front = site.front

    async def opened(tenant: str) -> LiveRequest:
        return (await site.open(generation(request_id=None, tenant=tenant)))[0]

    def end(request: LiveRequest) -> None:
        (key,) = request.live_keys
        site.port.emit(ends=[replace(finished(key), at_s=site.now_s)])

    more, fewer = (
        [await opened("more") for _ in range(4)],
        [await opened("fewer") for _ in range(3)],
    )
    running = await opened("quiet")
    for request in (*more[:3], *fewer):
        end(request)
    # they may be read yet
    with rejected(ErrorReason.QUEUE_FULL):
        await opened("quiet")
    site.now_s += 2.0
    end(more[3])
    await opened("quiet")
    assert [request.stream.is_aborted for request in (*more, *fewer, running)] == [
        *(True, True, True, False),
        *(False, False, False, False),
    ]
    with rejected(ErrorReason.READER_STALLED):
        await more[0].stream.take()
    await opened("quiet")
    await opened("quiet")
    assert len(front.table) == 8
    front.release(more[0])


@pytest.mark.parametrize(
    "field",
    [
        "front_id",
        "max_backlog_tokens",
        "max_num_outputs",
        "default_max_tokens",
        "max_output_tokens",
    ],
)
def test_an_invalid_config_value_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        FrontConfig(**{field: 0})  # type: ignore[arg-type]


def test_config_bounds_between_fields() -> None:
    with pytest.raises(ValueError, match="default_deadline_s"):
        FrontConfig(default_deadline_s=10.0, max_deadline_s=5.0)
    with pytest.raises(ValueError, match="max_reader_stall_s"):
        FrontConfig(max_reader_stall_s=float("nan"))


async def test_a_view_shows_the_current_state_of_its_request(text: ModelText) -> None:
    port = ScriptedPort()
    times = iter(range(100, 200))
    front = Front(
        text,
        FrontConfig(front_id=4, acceptance_delay_s=60.0),
        port=port,
        clock=lambda: float(next(times)),
    )
    port.listener = cast(Any, front)
    port.come_up()
    generation = GenerationSpec(
        prompt=TextInput(text="canary"),
        prompt_path="text_prompt.text",
        request_id="r-1",
        sampling=Sampling(num_outputs=2),
        urgency=Urgency(priority=7),
        tenant="acme",
        trace_id=b"\xab" * 16,
    )
    call = CallTimes(arrival_s=100.0)
    request = front.reserve(generation, call)
    (view,) = front.request_views()
    assert (view.phase, view.keys, view.num_prompt_tokens) == ("prepare", (), 0)
    assert (view.front_id, view.request_id, view.tenant, view.priority) == (4, "r-1", "acme", 7)
    assert view.trace_id == "ab" * 16
    assert view.history == (("prepare", 100.0),)

    await front.start(request, call)
    specs = await asyncio.wait_for(port.next_submission(), 60)
    (view,) = front.request_views()
    assert view.phase == "queue"
    assert view.keys == tuple(spec.key for spec in specs)
    assert view.num_prompt_tokens == specs[0].num_prompt_tokens > 0
    assert [spec.trace_id for spec in specs] == [b"\xab" * 16] * 2

    port.emit(changes=[admitted(specs[0].key, num_cached_tokens=1)])
    token = text.tokenizer.encode("a", add_special_tokens=False).tolist()[0]
    port.emit(tokens=[(specs[0].key, token), (specs[0].key, token)])
    (view,) = front.request_views()
    assert view.phase == "decode"
    assert [phase for phase, _ in view.history] == ["prepare", "queue", "prefill", "decode"]
    assert (view.num_output_tokens, view.num_cached_tokens, view.num_preemptions) == (2, 1, 0)
    assert view.num_backlog_tokens == front.num_backlog_tokens == 2
    assert "canary" not in repr(view)

    front.release(request)
    assert list(front.request_views()) == []
    assert front.num_backlog_tokens == 0
