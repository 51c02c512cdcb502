"""How a Multiplex call ends and what it leaves behind; the test controls engine and transport."""

from __future__ import annotations

import asyncio

import pytest
from grpc import StatusCode

from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.rpc.handlers import CallAccounts
from penstock.server.rpc.multiplex_encoding import MultiplexEncoder
from penstock.server.rpc.multiplex_table import MAX_UNSENT_REJECTIONS
from penstock.server.text.errors import TextError
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import admitted, finished, rich_status
from support.multiplex import cancel, credit, multiplex_call, submit
from support.timeout import TEST_TIMEOUT_S


async def rejection_of(task: asyncio.Task[None]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await task
    return caught.value


@pytest.mark.parametrize(
    ("command", "reason", "field"),
    [
        (submit(1), ErrorReason.INVALID_ARGUMENT, "submit.key"),
        (pb.MultiplexRequest(), ErrorReason.INVALID_ARGUMENT, "command"),
        (credit(1, 0), ErrorReason.INVALID_ARGUMENT, "credit.num_credit_tokens"),
        (b"\xff\xff", ErrorReason.MALFORMED_REQUEST, None),
        (
            b"\x0a\x08\x12\x06\x12\x04\x0a\x02\xc3\x28",
            ErrorReason.MALFORMED_REQUEST,
            "submit.generation.text_prompt.text",
        ),
    ],
)
@pytest.mark.parametrize("is_blocked", [False, True])
async def test_a_command_that_makes_no_sense_ends_the_call(
    text: ModelText,
    command: pb.MultiplexRequest | bytes,
    reason: ErrorReason,
    field: str | None,
    is_blocked: bool,
) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1))
        key = await call.port.next_key()
        if is_blocked:
            call.wire.is_open.clear()
            call.port.send(key, [call.token("a")])
            await call.settle()
        call.wire.send(command)
        error = await rejection_of(call.task)
        assert error.reason is reason
        assert [v.path for v in error.failure.violations] == ([field] if field else [])
        assert call.port.cancelled == [((key,), FinishReason.CANCELLED)]
        assert len(call.front.table) == 0
        assert not call.front.shared_writers


async def test_half_close_lets_open_requests_finish(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1))
        call.wire.half_close()
        key = await call.port.next_key()
        await call.settle()
        assert not call.task.done()
        call.port.send(key, [call.token("a")])
        call.port.finish(key)
        await call.task
        assert call.wire.text(1) == "a"


async def test_a_call_without_requests_ends_well(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        await call.settle()
        assert call.wire.has_metadata
        call.wire.half_close()
        await call.task
        assert call.wire.messages == []


@pytest.mark.parametrize("is_blocked", [False, True])
async def test_a_dropped_call_releases_everything_at_once(
    text: ModelText, is_blocked: bool
) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1), submit(2))
        keys = (await call.port.next_key(), await call.port.next_key())
        if is_blocked:
            call.wire.is_open.clear()
            call.port.send(keys[0], [call.token("a")])
        await call.settle()
        call.task.cancel()
        await asyncio.wait([call.task])
        assert call.task.cancelled()
        assert call.port.cancelled == [(keys, FinishReason.CANCELLED)]
        assert len(call.front.table) == 0
        assert not call.front.shared_writers


async def test_a_dropped_call_stops_tokenising(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    async def encode(text: str, **_: object) -> object:
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            stopped.append(text)
            raise

    monkeypatch.setattr(text.tokenizer, "encode_async", encode)
    async with multiplex_call(text) as call:
        call.wire.send(submit(1, text="one"))
        await call.settle()
        call.task.cancel()
        await asyncio.wait([call.task])
        await call.settle()
        assert stopped == ["one"]
        assert len(call.front.table) == 0
        assert call.port.cancelled == []


async def test_a_half_closed_call_ends_well_in_a_drain(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1))
        call.wire.half_close()
        key = await call.port.next_key()
        call.front.begin_drain()
        await call.settle()
        call.port.finish(key)
        await call.task
        assert call.wire.kinds(1)[-1] == "finished"


async def test_a_reader_that_stalls_is_cut_with_all_its_requests(
    text: ModelText, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    config = FrontConfig(max_reader_stall_s=5.0)
    async with multiplex_call(text, config, clock=lambda: now_s) as call:
        call.wire.send(submit(1), submit(2))
        keys = (await call.port.next_key(), await call.port.next_key())
        call.wire.is_open.clear()
        call.port.send(keys[0], [call.token("a")])
        await call.settle()
        now_s += 5.0
        call.front.disconnect_stalled()
        assert call.front.counters.num_disconnected_readers == 0, "not stalled long enough"
        now_s += 0.1
        call.front.disconnect_stalled()
        call.front.disconnect_stalled()
        error = await rejection_of(call.task)
        assert error.reason is ErrorReason.READER_STALLED
        assert call.port.cancelled == [(keys, FinishReason.CANCELLED)]
        assert call.front.counters.num_disconnected_readers == 1
        assert "blocked for 5.1 s" in caplog.text


async def test_a_request_whose_end_gets_no_credit_is_closed(text: ModelText) -> None:
    now_s = 1000.0
    config = FrontConfig(max_reader_stall_s=5.0)
    async with multiplex_call(text, config, clock=lambda: now_s) as call:
        call.wire.send(submit(1, credit=0), submit(2, credit=0), submit(3, credit=0))
        one, two, three = [await call.port.next_key() for _ in range(3)]
        call.port.emit(tokens=[(key, call.token("a")) for key in (one, two, three)] * 2)
        call.port.emit(ends=[finished(one), finished(two)])
        await call.settle()
        now_s += 4.0
        call.wire.send(credit(2, 1))
        call.wire.half_close()
        await call.settle()
        now_s += 4.0
        call.front.disconnect_stalled()
        await call.settle()
        assert call.wire.kinds(1)[-1] == "READER_STALLED"
        assert call.wire.kinds(2)[-1] == "tokens", "it moved meanwhile"
        now_s += 1.1
        call.front.disconnect_stalled()
        await call.settle()
        assert call.wire.kinds(2)[-1] == "READER_STALLED"
        assert call.wire.kinds(3) == ["accepted"], "one that generates is bounded by its backlog"
        call.port.fail(three, FailureReason.DEADLINE_EXCEEDED)
        await call.settle()
        now_s += 5.1
        call.front.disconnect_stalled()
        await call.task
        assert call.wire.kinds(3) == ["accepted", "READER_STALLED"]


async def test_credit_in_time_saves_an_end(text: ModelText) -> None:
    now_s = 1000.0
    config = FrontConfig(max_reader_stall_s=5.0)
    async with multiplex_call(text, config, clock=lambda: now_s) as call:
        call.wire.send(submit(1, credit=0))
        key = await call.port.next_key()
        call.port.emit(tokens=[(key, call.token("a"))] * 3, ends=[finished(key)])
        await call.settle()
        for _ in range(3):
            now_s += 4.0
            call.front.disconnect_stalled()
            call.wire.send(credit(1, 1))
            await call.settle()
        assert call.wire.text(1) == "aaa"
        assert call.wire.kinds(1)[-1] == "finished"


async def test_a_prompt_that_fails_after_its_request_was_cancelled(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open = asyncio.Event()

    async def encode(text: str, **_: object) -> object:
        await is_open.wait()
        raise TextError("no tokens")

    monkeypatch.setattr(text.tokenizer, "encode_async", encode)
    async with multiplex_call(text) as call:
        call.wire.send(submit(1), submit(2))
        await call.settle()
        call.wire.send(cancel(1))
        await call.settle()
        assert call.wire.kinds(1) == ["accepted", "finished"]
        is_open.set()
        await call.settle()
        assert call.wire.kinds(2) == ["INVALID_ARGUMENT"]
        assert len(call.wire.events(1)) == 2
        assert not call.task.done()


async def test_a_drain_rejects_and_ends_the_call_with_its_last_request(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1))
        key = await call.port.next_key()
        call.front.begin_drain()
        call.wire.send(submit(2))
        await call.settle()
        assert call.wire.kinds(2) == ["DRAINING"]
        assert rich_status(call.wire.events(2)[0].error).retry_s is not None
        assert not call.task.done()
        call.port.finish(key)
        error = await rejection_of(call.task)
        assert error.reason is ErrorReason.DRAINING
        assert call.wire.kinds(1)[-1] == "finished"


async def test_an_idle_call_does_not_delay_a_drain(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        await call.settle()
        call.front.begin_drain()
        error = await rejection_of(call.task)
        assert error.reason is ErrorReason.DRAINING


async def test_a_lost_engine_ends_each_request_and_not_the_call(text: ModelText) -> None:
    # On a busy machine the engine is lost later than the usual delay.
    config = FrontConfig(max_replays=0, acceptance_delay_s=TEST_TIMEOUT_S)
    async with multiplex_call(text, config) as call:
        call.wire.send(submit(1), submit(2))
        for _ in range(2):
            await call.port.next_key()
        call.port.go_down()
        await call.settle()
        call.wire.send(submit(3))
        await call.settle()
        for key in (1, 2, 3):
            assert call.wire.kinds(key) == ["ENGINE_DOWN"]
        call.port.come_up(epoch=2)
        call.wire.send(submit(1))
        call.port.finish(await call.port.next_key())
        await call.settle()
        assert call.wire.kinds(1) == ["ENGINE_DOWN", "accepted", "finished"]


async def test_a_client_that_does_not_read_rejections_is_not_read_either(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.is_open.clear()
        bad = submit(0, edit=lambda m: m.ClearField("text_prompt")).submit.generation
        num_commands = 4 * MAX_UNSENT_REJECTIONS
        for key in range(num_commands):
            call.wire.send(pb.MultiplexRequest(submit=pb.MultiplexSubmit(key=key, generation=bad)))
        for _ in range(num_commands):
            await call.settle()
        assert call.wire.num_unread >= num_commands - 2 * MAX_UNSENT_REJECTIONS - 1
        call.wire.is_open.set()
        call.wire.half_close()
        await call.task
        assert [event.key for event in call.wire.events()] == list(range(num_commands))


async def test_an_internal_error_ends_only_one_request(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1), submit(2))
        one, two = await call.port.next_key(), await call.port.next_key()
        call.port.emit(changes=[admitted(one), admitted(two)])
        await call.settle()
        encode_text = MultiplexEncoder.encode_text

        def fail_once(self: MultiplexEncoder, text: str, num_tokens: int = 1) -> bytes:
            monkeypatch.setattr(MultiplexEncoder, "encode_text", encode_text)
            raise RuntimeError("canary")

        monkeypatch.setattr(MultiplexEncoder, "encode_text", fail_once)
        call.port.emit(tokens=[(one, call.token("a")), (two, call.token("a"))])
        call.port.finish(two)
        await call.settle()
        assert call.wire.kinds(1)[-1] == "INTERNAL"
        assert b"canary" not in call.wire.events(1)[-1].SerializeToString()
        assert call.wire.kinds(2)[-1] == "finished"
        assert call.port.cancelled == [((one,), FinishReason.CANCELLED)]
        assert call.front.counters.num_internal_errors == 1


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_client_that_disconnects_with_its_last_event(
    text: ModelText, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(CallAccounts, "close", lambda _, __, outcome: codes.append(outcome.code))
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with multiplex_call(text) as call:
        monkeypatch.setattr(call.wire, "write", lambda _: written)
        call.wire.send(submit(1))
        call.port.finish(await call.port.next_key())
        await call.settle()
        if is_written:
            written.set_result(None)
        else:
            written.set_exception(ConnectionResetError())
        call.task.cancel()
        await asyncio.wait([call.task])

        assert call.task.cancelled()
        assert codes == [StatusCode.OK.value[0] if is_written else StatusCode.CANCELLED.value[0]]
