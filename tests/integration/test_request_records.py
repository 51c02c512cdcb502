"""Every call with a request leaves exactly one record, however it ends."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from penstock.scheduler.events import Admitted, Completed, Preempted, Residency, Wait
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.text.model_text import ModelText
from support.calls import SERVICE, STYLES, Call
from support.fronts import ServedFront, queued
from support.generate_requests import text_request
from support.record_log import RecordLog, check_tiling, kinds, logged, run_to_end


@pytest.fixture
async def site(text: ModelText) -> AsyncIterator[tuple[ServedFront, RecordLog]]:
    async with logged(text) as site:
        yield site


@dataclass
class End:
    """One way in which a request ends: the client's request, the actions after it, and the expected
    record.
    """

    code: grpc.StatusCode
    reason: str = ""
    act: Callable[[ServedFront, Call], Awaitable[None]] | None = None
    prepare: Callable[[ServedFront], Any] | None = None
    message: Any = field(default_factory=text_request)
    options: dict[str, Any] = field(default_factory=dict)


async def act_ok(served: ServedFront, call: Call) -> None:
    await run_to_end(served, await served.port.next_key())


async def act_cancel_in_queue(served: ServedFront, call: Call) -> None:
    served.port.emit(changes=[queued(await served.port.next_key(), 5)])
    call.call.cancel()


async def act_cancel_in_decode(served: ServedFront, call: Call) -> None:
    key = await served.port.next_key()
    served.port.admit(key)
    served.port.send(key, served.encode("a"))
    call.call.cancel()


async def act_silence(served: ServedFront, call: Call) -> None:
    await served.port.next_key()


async def act_engine_lost(served: ServedFront, call: Call) -> None:
    served.port.admit(await served.port.next_key())
    served.port.go_down()
    served.server.front.on_no_further_engine()


async def act_stop(served: ServedFront, call: Call) -> None:
    served.port.admit(await served.port.next_key())
    await served.server.stop()


def act_fail(reason: FailureReason) -> Callable[[ServedFront, Call], Awaitable[None]]:
    async def act(served: ServedFront, call: Call) -> None:
        served.port.fail(await served.port.next_key(), reason)

    return act


def break_engine_talk(served: ServedFront) -> None:
    def broken(specs: object, kept: object = None) -> None:
        raise ZeroDivisionError("canary of a prompt")

    served.port.submit = broken  # type: ignore[method-assign]


C = grpc.StatusCode
ENDS: dict[str, End] = {
    "ok": End(C.OK, act=act_ok),
    "malformed": End(C.INVALID_ARGUMENT, "MALFORMED_REQUEST", message=b"\xff\xff"),
    "bad field": End(
        C.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        message=text_request(scheduling={"priority": 1000}),
    ),
    "unknown model": End(
        C.NOT_FOUND, "MODEL_NOT_FOUND", message=text_request(model="canary-model")
    ),
    "prompt too long": End(
        C.INVALID_ARGUMENT, "PROMPT_TOO_LONG", message=text_request("a lot of it " * 500)
    ),
    "no engine": End(C.UNAVAILABLE, "ENGINE_DOWN", prepare=lambda served: served.port.go_down()),
    "draining": End(
        C.UNAVAILABLE, "DRAINING", prepare=lambda served: served.server.front.begin_drain()
    ),
    "queue full": End(C.RESOURCE_EXHAUSTED, "QUEUE_FULL", act=act_fail(FailureReason.QUEUE_FULL)),
    "deadline in the engine": End(
        C.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", act=act_fail(FailureReason.DEADLINE_EXCEEDED)
    ),
    "executor failed": End(
        C.INTERNAL,
        "EXECUTOR_REQUEST_FAILED",
        act=act_fail(FailureReason.EXECUTOR_REQUEST_FAILED),
    ),
    "deadline of the call": End(
        C.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", act=act_silence, options={"timeout": 4.0}
    ),
    "cancelled in the queue": End(C.CANCELLED, act=act_cancel_in_queue),
    "cancelled while it runs": End(C.CANCELLED, act=act_cancel_in_decode),
    "engine lost": End(C.UNAVAILABLE, "ENGINE_DOWN", act=act_engine_lost),
    "stopped": End(C.UNAVAILABLE, "DRAINING", act=act_stop),
    "bug": End(C.INTERNAL, "INTERNAL", prepare=break_engine_talk),
}


@pytest.mark.parametrize("style", STYLES[:2])
@pytest.mark.parametrize("name", ENDS)
async def test_every_kind_of_end_leaves_one_record(text: ModelText, style: str, name: str) -> None:
    end = ENDS[name]
    async with logged(text) as (served, log):
        if end.prepare is not None:
            end.prepare(served)
        call = Call(served.channel, style, end.message, **end.options)
        if end.act is not None:
            await end.act(served, call)
        assert await call.outcome() == end.code.name
        record = await log.next()
    assert len(log.records) == 1
    assert (record.code, record.reason) == (end.code.value[0], end.reason)
    assert record.method == f"{SERVICE}/{style}"
    assert record.sequence == 0
    assert record.peer.startswith("ipv4:127.0.0.1:")
    assert record.model == ("" if name in ("malformed", "unknown model") else "tiny")
    assert record.options.is_stream is (style == "Generate" or name == "malformed")
    check_tiling(record)
    (count,) = log.recorder.outcomes()
    assert (count.code, count.reason, count.num) == (record.code, record.reason, 1)


@pytest.mark.parametrize("style", STYLES[:2])
async def test_a_successful_request_is_recorded_completely(
    site: tuple[ServedFront, RecordLog], style: str
) -> None:
    served, log = site
    message = text_request("hello", request_id="r-1")
    message.sampling.temperature = 0.7
    message.stopping.max_tokens = 9
    message.scheduling.priority = 4
    call = Call(served.channel, style, message)
    (spec,) = await served.port.next_submission()
    await run_to_end(served, spec.key)
    assert await call.outcome() == "OK"
    record = await log.next()
    assert record.request_id == "r-1"
    assert kinds(record) == ["prepare", "queue", "prefill", "decode", "deliver"]
    assert record.finish_reasons == ("LENGTH",)
    assert record.num_prompt_tokens == spec.num_prompt_tokens
    assert record.num_cached_tokens == record.segments[2].num_cached_tokens == 2
    assert record.num_completion_tokens == record.segments[3].num_tokens == 3
    assert 0 < record.ttft_s < record.end_s - record.arrival_s
    assert (record.num_ahead, record.estimated_queue_s) == (3, 0.25)
    assert record.options.temperature == 0.7
    assert record.options.max_tokens == 9
    assert record.options.top_p is None
    assert record.options.priority == 4
    assert record.num_messages >= 1
    assert (record.num_stalls, record.stalled_s) == (0, 0.0)
    assert record.content is None
    assert spec.trace_id == record.trace.trace_id
    assert len(record.trace.trace_id) == 16
    assert len(record.trace.span_id) == 8


async def test_the_record_of_a_rejected_request_has_no_engine_data(
    site: tuple[ServedFront, RecordLog],
) -> None:
    served, log = site
    await Call(served.channel, "Generate", text_request(scheduling={"priority": 1000})).outcome()
    record = await log.next()
    assert kinds(record) == ["prepare"]
    assert math.isnan(record.ttft_s)
    assert record.num_ahead == -1
    assert record.num_messages == 0
    assert record.options.priority == 1000


async def test_preemption_and_the_engines_report(site: tuple[ServedFront, RecordLog]) -> None:
    served, log = site
    call = Call(served.channel, "Generate", text_request())
    key = await served.port.next_key()
    clock = served.server.front.clock
    waits = (Wait(slots_s=0.5), Wait(blocks_s=0.25, num_passed_by=1))
    residencies = (
        Residency(num_chunks=1, num_steps=2),
        Residency(num_chunks=2, num_steps=3, max_batch_size=7),
    )
    emit = served.port.emit

    def admit(again: int, num_cached_tokens: int) -> None:
        change = Admitted(
            key=key,
            at_s=clock(),
            num_cached_tokens=num_cached_tokens,
            num_preemptions=again,
            wait=waits[again],
        )
        emit(changes=[change])

    admit(0, 1)
    served.port.send(key, served.encode("ab"))
    emit(changes=[Preempted(key=key, at_s=clock(), residency=residencies[0])])
    admit(1, 4)
    served.port.send(key, served.encode("c"))
    end = Completed(key=key, at_s=clock(), reason=FinishReason.STOP, residency=residencies[1])
    emit(ends=[end])
    await call.outcome()
    record = await log.next()
    running = ["queue", "prefill", "decode"]
    assert kinds(record) == ["prepare", *running, *running, "deliver"]
    queues = [segment for segment in record.segments if segment.kind == "queue"]
    decodes = [segment for segment in record.segments if segment.kind == "decode"]
    prefills = [segment for segment in record.segments if segment.kind == "prefill"]
    assert [segment.wait for segment in queues] == list(waits)
    assert [segment.residency for segment in decodes] == list(residencies)
    assert [segment.num_tokens for segment in decodes] == [2, 1]
    assert [segment.num_cached_tokens for segment in prefills] == [1, 4]
    assert record.num_cached_tokens == 1
    assert record.num_preemptions == 1
