"""The status page's JSON, and how the event loop fetches it."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from penstock.server.observe.metrics.application import (
    MAX_AGE_S,
    MAX_REQUESTS,
    LiveStatus,
    status_json,
)
from penstock.server.observe.operations.service import Operations
from penstock.server.observe.operations.snapshot import (
    OperationsError,
    PhaseChange,
    RequestView,
    Snapshot,
)
from support.metric_samples import request_view, snapshot


def test_the_keys_are_those_of_the_snapshot() -> None:
    history = (PhaseChange(phase="queue", since_s=5.0),)
    told = json.loads(status_json(snapshot(), (request_view(history=history),)))

    assert told["models"][0]["cache"]["num_used_blocks"] == 2700
    assert told["models"][0]["ttft"] == {"p50_s": 0.041, "p90_s": 0.12, "p99_s": 0.6, "num": 812}
    assert told["fronts"][0]["pid"] == 101
    assert told["requests"][0]["request_id"] == "chat-1"
    assert told["requests"][0]["history"] == [{"phase": "queue", "since_s": 5.0}]
    assert told["num_requests"] == 1
    assert told["requests_problem"] == ""


def test_what_is_no_number_is_null() -> None:
    told = json.loads(
        status_json(snapshot(mean_step_s=math.nan), (request_view(time_to_deadline_s=math.inf),))
    )

    assert told["models"][0]["mean_step_s"] is None
    assert told["requests"][0]["time_to_deadline_s"] is None


def test_it_is_safe_within_markup_and_bounded() -> None:
    views = tuple(request_view(request_id="</script>ü\u2028") for _ in range(MAX_REQUESTS + 1))
    text = status_json(snapshot(), views)

    assert b"<" not in text
    told = json.loads(text)
    assert told["requests"][0]["request_id"] == "</script>ü\u2028"
    assert (len(told["requests"]), told["num_requests"]) == (MAX_REQUESTS, MAX_REQUESTS + 1)


class FakeDesk(Operations):
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.problem = ""

    def snapshot(self) -> Snapshot:
        return snapshot()

    async def live_requests(self) -> tuple[RequestView, ...]:
        self.num_asked += 1
        if self.problem:
            raise OperationsError(self.problem)
        return (request_view(),)


async def test_however_many_look_the_desk_is_asked_seldom() -> None:
    desk, now = FakeDesk(), [0.0]
    status = LiveStatus(desk, asyncio.get_running_loop(), clock=lambda: now[0])

    answers = await asyncio.gather(*(asyncio.to_thread(status) for _ in range(8)))
    assert len(set(answers)) == 1
    assert desk.num_asked == 1
    now[0] += MAX_AGE_S + 0.01
    await asyncio.to_thread(status)
    assert desk.num_asked == 2


async def test_a_service_without_its_engine_still_has_a_status() -> None:
    desk = FakeDesk()
    desk.problem = "the engine is down"

    told = json.loads(await asyncio.to_thread(LiveStatus(desk, asyncio.get_running_loop())))

    assert told["requests"] == []
    assert told["requests_problem"] == "the engine is down"
    assert told["models"][0]["model"] == "demo"


def test_after_the_end_of_the_loop_there_is_no_status() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError):
        LiveStatus(FakeDesk(), loop)()
