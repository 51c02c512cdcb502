"""Every request of a Multiplex stream leaves one record, however the request or stream ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import FailureReason
from penstock.server.front.config import FrontConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import ServedFront, serving
from support.multiplex import cancel, submit
from support.record_log import RecordLog, check_tiling, kinds
from support.timeout import TEST_TIMEOUT_S

C = grpc.StatusCode
METHOD = "penstock.v1.GenerationService/Multiplex"
CALL_TRACE, OWN_TRACE = "a" * 32, "b" * 32


class Stream:
    """A Multiplex call, and the record log of the front that serves it."""

    def __init__(self, served: ServedFront, log: RecordLog, **options: Any) -> None:
        self.served = served
        self.log = log
        self.call: Any = served.stub.Multiplex(**options)

    async def send(self, *commands: pb.MultiplexRequest) -> None:
        for command in commands:
            await self.call.write(command)

    async def begin(self, key: int, **options: Any) -> int:
        await self.send(submit(key, **options))
        (spec, *_) = await self.served.port.next_submission()
        return spec.key

    async def run(self, key: int) -> None:
        self.served.port.admit(key)
        self.served.port.send(key, self.served.encode("abc"))
        self.served.port.finish(key)

    async def end(self) -> grpc.StatusCode:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            code: grpc.StatusCode = await self.call.code()
        return code

    async def record(self, code: grpc.StatusCode, reason: str = "") -> RequestRecord:
        record = await self.log.next()
        assert (record.code, record.reason) == (code.value[0], reason)
        assert record.method == METHOD
        check_tiling(record)
        return record


@asynccontextmanager
async def streaming(
    text: ModelText, config: FrontConfig | None = None, **options: Any
) -> AsyncGenerator[Stream]:
    log = RecordLog()
    async with serving(text, config, recorder=log.recorder, is_tracing=True) as served:
        served.port.is_answering = True
        yield Stream(served, log, **options)
    assert log.recorder.num_unreadable == 0


async def test_completed_and_rejected_requests_leave_one_record_each(text: ModelText) -> None:
    async with streaming(text) as stream:
        await stream.run(await stream.begin(1))
        record = await stream.record(C.OK)
        assert kinds(record) == ["prepare", "queue", "prefill", "decode", "deliver"]
        assert record.num_completion_tokens == 3
        assert record.num_messages > 1
        await stream.send(submit(2, edit=lambda message: message.stopping.stop_strings.append("")))
        await stream.record(C.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        stream.served.port.fail(await stream.begin(3), FailureReason.QUEUE_FULL)
        await stream.record(C.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        await stream.begin(4)
        await stream.send(cancel(4))
        record = await stream.record(C.OK)
        assert record.finish_reasons == ("CANCELLED",)
        await stream.call.done_writing()
        assert await stream.end() is C.OK
    assert len(stream.log.records) == 4, "none for the call itself"


async def test_a_duplicate_key_ends_the_call_and_all_its_requests(text: ModelText) -> None:
    async with streaming(text) as stream:
        await stream.begin(1)
        await stream.send(submit(1))
        await stream.record(C.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        await stream.record(C.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        assert await stream.end() is C.INVALID_ARGUMENT
    assert len(stream.log.records) == 2


@pytest.mark.parametrize("how", ["cancel", "deadline", "drop", "stop", "engine lost"])
async def test_a_dropped_stream_leaves_one_record_per_request(text: ModelText, how: str) -> None:
    expected = {
        "cancel": (C.CANCELLED, ""),
        "deadline": (C.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        "drop": (C.CANCELLED, ""),
        "stop": (C.UNAVAILABLE, "DRAINING"),
        "engine lost": (C.UNAVAILABLE, "ENGINE_DOWN"),
    }[how]
    # Enough time to begin five requests on a busy machine.
    options: dict[str, Any] = {"timeout": 4.0} if how == "deadline" else {}
    async with streaming(text, **options) as stream:
        keys = [await stream.begin(number) for number in range(5)]
        stream.served.port.admit(keys[0])
        if how == "cancel":
            stream.call.cancel()
        elif how == "drop":
            await stream.served.channel.close()
        elif how == "stop":
            await stream.served.server.stop()
        elif how == "engine lost":
            stream.served.port.go_down()
            stream.served.server.front.on_no_further_engine()
        for _ in keys:
            await stream.record(*expected)
    assert len(stream.log.records) == len(keys)


async def test_a_stalled_reader_ends_all_its_requests(text: ModelText) -> None:
    config = FrontConfig(acceptance_delay_s=0.0, max_backlog_tokens=16)
    async with streaming(text, config) as stream:
        key = await stream.begin(1, credit=0)
        stream.served.port.admit(key)
        stream.served.port.send(key, stream.served.encode("a") * 17)
        await stream.record(C.RESOURCE_EXHAUSTED, "READER_STALLED")
        stream.call.cancel()


async def test_a_request_belongs_to_its_own_or_the_calls_trace(text: ModelText) -> None:
    metadata = (("traceparent", f"00-{CALL_TRACE}-{'1' * 16}-00"),)
    async with streaming(text, metadata=metadata) as stream:
        for number, (own, parent) in enumerate(
            [
                (None, "1" * 16),
                (f"00-{OWN_TRACE}-{'2' * 16}-01", "2" * 16),
                ("canary", ""),
            ]
        ):
            message = submit(number)
            if own is not None:
                message.submit.traceparent = own
            await stream.send(message)
            (spec,) = await stream.served.port.next_submission()
            await stream.run(spec.key)
            trace = (await stream.record(C.OK)).trace
            assert trace.parent_span_id.hex() == parent
            assert trace.is_parent_sampled == {"1": False, "2": True, "": None}[parent[:1]]
            assert spec.trace_id == trace.trace_id
            assert (trace.trace_id.hex() in (CALL_TRACE, OWN_TRACE)) is bool(parent)
        stream.call.cancel()


async def test_an_internal_error_fails_only_its_request(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streaming(text) as stream:
        first, second = await stream.begin(1), await stream.begin(2)

        def broken(now_s: float, **_: object) -> bool:
            raise ZeroDivisionError("canary of a prompt")

        broken_output = stream.served.server.front.table.output(first)
        assert broken_output is not None
        monkeypatch.setattr(type(broken_output.request.phases), "note_admitted", broken)
        stream.served.port.admit(first)
        await stream.record(C.INTERNAL, "INTERNAL")
        monkeypatch.undo()
        await stream.run(second)
        await stream.record(C.OK)
        stream.call.cancel()
