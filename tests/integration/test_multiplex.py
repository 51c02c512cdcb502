"""Many requests share one Multiplex stream, over a real socket."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.front.watched_write import STALL_S
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import state_pb2
from support.fronts import SMALL_WINDOW, ServedFront, admitted, finished, rich_error, serving
from support.multiplex import cancel, credit, kind, submit
from support.timeout import TEST_TIMEOUT_S, until_true

Call = grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]


class Reader:
    """The client's side of a Multiplex call. `events`: the events read so far, by key."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.events: dict[int, list[pb.MultiplexEvent]] = {}
        self.num_messages = 0

    async def until(self, key: int, what: str) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while what not in self.kinds(key):
                assert await self._next(), f"the stream ended without {what} of {key}"

    async def rest(self) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while await self._next():
                pass

    async def failure(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.rest()
        return caught.value

    def kinds(self, key: int) -> list[str]:
        return [kind(event) for event in self.events.get(key, [])]

    def text(self, key: int) -> str:
        return "".join(event.response.tokens.text for event in self.events.get(key, []))

    async def _next(self) -> bool:
        message = await self._call.read()
        if not isinstance(message, pb.MultiplexResponse):
            return False
        self.num_messages += 1
        for event in message.events:
            self.events.setdefault(event.key, []).append(event)
        return True


async def open_call(served: ServedFront, *commands: pb.MultiplexRequest) -> tuple[Call, Reader]:
    call = served.stub.Multiplex()
    for command in commands:
        await call.write(command)
    return call, Reader(call)


async def submitted(served: ServedFront, num_requests: int) -> list[int]:
    """Return the engine keys of the next `num_requests` requests, in ascending order."""
    return sorted([(await served.port.next_submission())[0].key for _ in range(num_requests)])


async def test_many_requests_one_cancelled_one_rejected_one_slow(served: ServedFront) -> None:
    num_requests, num_tokens = 60, 30
    call, reader = await open_call(
        served, *(submit(key, credit=3 if key == 2 else None) for key in range(num_requests))
    )
    keys = await submitted(served, num_requests)
    served.port.emit(changes=[admitted(key) for key in keys])
    a = served.encode("a")[0]
    for step in range(num_tokens):
        served.port.emit(tokens=[(key, a) for key in keys])
        if step == 10:
            await call.write(cancel(1))
            await call.write(submit(1000, edit=lambda m: m.ClearField("text_prompt")))
            await reader.until(1000, "INVALID_ARGUMENT")
            assert await served.port.next_cancel() == ((keys[1],), FinishReason.CANCELLED)
            served.port.finish(keys.pop(1), FinishReason.CANCELLED)
    served.port.emit(ends=[finished(key) for key in keys])
    await reader.until(num_requests - 1, "finished")
    assert reader.text(2) == "aaa"
    assert "finished" not in reader.kinds(2)
    await call.write(credit(2, num_tokens))
    await call.done_writing()
    await reader.rest()
    assert await call.code() is grpc.StatusCode.OK
    for key in (0, *range(2, num_requests)):
        assert reader.text(key) == "a" * num_tokens
        assert reader.kinds(key)[-1] == "finished"
        sequences = [event.response.sequence for event in reader.events[key]]
        assert sequences == list(range(len(sequences)))
    assert reader.text(1) == "a" * 11
    end = reader.events[1][-1].response.finished.outputs[0]
    assert end.finish_reason == state_pb2.FINISH_REASON_CANCELLED
    assert reader.num_messages < num_requests * num_tokens / 10, "events share messages"
    assert served.server.num_live_requests == 0


async def test_a_lost_connection_frees_everything_while_a_write_is_blocked(
    text: ModelText, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(text, FrontConfig(max_backlog_tokens=10**9)) as served:
        channel = grpc.aio.insecure_channel(served.address, options=list(SMALL_WINDOW))
        call = pb_grpc.GenerationServiceStub(channel).Multiplex()
        await call.write(submit(1))
        (key,) = await submitted(served, 1)
        await block_writer(served, key)
        await channel.close()
        assert await served.port.next_cancel() == ((key,), FinishReason.CANCELLED)
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await until_true(lambda: not len(served.server.front.table))
        assert "Traceback" not in caplog.text


async def block_writer(served: ServedFront, key: int) -> None:
    """Send more tokens than a small window holds, and wait until the front counts the call's writer
    as blocked by its reader.
    """
    front = served.server.front
    (writer,) = front.shared_writers
    a = served.encode("a")[0]
    for _ in range(20):
        served.port.emit(tokens=[(key, a)] * 5000)
    await until_true(lambda: front.clock() - writer.blocked_since_s > STALL_S)


async def test_a_stalled_reader_is_reported_and_all_is_freed(text: ModelText) -> None:
    config = FrontConfig(max_reader_stall_s=0.2, max_backlog_tokens=10**9)
    async with serving(text, config, channel_options=SMALL_WINDOW) as served:
        _, reader = await open_call(served, submit(1), submit(2))
        keys = await submitted(served, 2)
        await block_writer(served, keys[0])
        reported, reason = await served.port.next_cancel()
        assert (sorted(reported), reason) == (keys, FinishReason.CANCELLED)
        error = rich_error(await reader.failure())
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.info.reason == "READER_STALLED"
        assert served.server.num_live_requests == 0


async def test_drain_waits_for_the_last_request_and_not_for_idle_calls(text: ModelText) -> None:
    async with serving(text) as served:
        _, idle = await open_call(served)
        busy_call, busy = await open_call(served, submit(1))
        (key,) = await submitted(served, 1)
        drain = asyncio.ensure_future(served.server.drain(TEST_TIMEOUT_S))
        error = rich_error(await idle.failure())
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.info.reason == "DRAINING"
        await busy_call.write(submit(2))
        await busy.until(2, "DRAINING")
        assert not drain.done()
        served.port.finish(key)
        assert rich_error(await busy.failure()).info.reason == "DRAINING"
        assert busy.kinds(1)[-1] == "finished"
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await drain


async def test_the_calls_deadline_is_not_the_requests(served: ServedFront) -> None:
    call = served.stub.Multiplex(timeout=TEST_TIMEOUT_S)
    await call.write(submit(1))
    await call.write(submit(2, edit=lambda m: m.scheduling.total_timeout.FromSeconds(5)))
    one, two = sorted(
        [(await served.port.next_submission())[0] for _ in range(2)], key=lambda spec: spec.key
    )
    assert one.deadline_s - one.arrival_s == pytest.approx(600.0), "the server's default"
    assert two.deadline_s - two.arrival_s == pytest.approx(5.0)
    call.cancel()


async def test_the_tenant_is_the_calls(text: ModelText) -> None:
    config = FrontConfig(tenant_metadata_key="x-tenant")
    async with serving(text, config) as served:
        call = served.stub.Multiplex(metadata=(("x-tenant", "acme"),))
        await call.write(submit(1))
        (spec,) = await served.port.next_submission()
        assert spec.tenant == "acme"
        call.cancel()
        bad = Reader(served.stub.Multiplex(metadata=(("x-tenant", "a,b"),)))
        assert rich_error(await bad.failure()).fields == ["metadata[x-tenant]"]
