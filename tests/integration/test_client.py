"""Streams of both clients against a real gRPC server: events, errors, retries, broken streams."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator

import grpc
import pytest

import penstock.v1 as pb
from penstock.client import (
    Accepted,
    CallCancelled,
    DeadlineExceeded,
    Draining,
    EngineDown,
    Event,
    ExecutorRefused,
    ExecutorRequestFailed,
    Finished,
    InvalidArgument,
    PromptEcho,
    QueueFull,
    ReaderStalled,
    StreamBroken,
    Tokens,
    Unavailable,
)
from support.client_faces import (
    POLICY,
    Face,
    FakeTime,
    accept,
    accept_and_speak,
    failing,
)
from support.scripted_server import (
    Script,
    ScriptedServer,
    ServedCall,
    retry_info,
    speak_and_wait,
)

# An HTTP/2 server that refuses every stream, as a server does above its limit of streams.

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING = 0x1, 0x3, 0x4, 0x6
_ACK = 0x1
_REFUSED_STREAM = 0x7


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    head = struct.pack(">BBI", kind, flags, stream_id)
    return len(payload).to_bytes(3, "big") + head + payload


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(len(_PREFACE))
    writer.write(_frame(_SETTINGS, 0, 0))
    while True:
        head = await reader.readexactly(9)
        kind, flags, stream_id = struct.unpack(">BBI", head[3:])
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            writer.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _HEADERS:
            refusal = _REFUSED_STREAM.to_bytes(4, "big")
            writer.write(_frame(_RST_STREAM, 0, stream_id, refusal))


@contextlib.asynccontextmanager
async def refusing_streams() -> AsyncGenerator[str, None]:
    """Serve on 127.0.0.1 during the block; return the address."""

    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            try:
                await _refuse(reader, writer)
            finally:
                writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


async def test_a_stream_from_accepted_to_finished(face: Face, server: ScriptedServer) -> None:
    events = await face.events("Hi", temperature=0.5, max_tokens=2, request_id="mine")

    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Accepted", "Progress", "Progress", "Tokens", "Tokens", "Finished"]
    assert [event.sequence for event in events] == list(range(6))
    request = server.seen[0].request
    assert request.text_prompt.text == "Hi"
    assert request.sampling.temperature == 0.5
    assert request.stopping.max_tokens == 2
    assert request.request_id == "mine"


async def test_text_alone(face: Face) -> None:
    assert await face.text("Hi") == ["Hello, ", "world"]


async def test_text_of_several_outputs_is_refused(face: Face) -> None:
    with pytest.raises(ValueError, match=r"^n:"):
        await face.text("Hi", n=2)


async def test_refusal_is_typed_and_not_tried_again(
    face: Face, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(failing(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"))

    with pytest.raises(InvalidArgument) as caught:
        await face.events("Hi")

    assert caught.value.message == "scripted"
    assert len(server.seen) == 1
    assert time.slept_s == []


async def test_unavailable_then_well(face: Face, server: ScriptedServer, time: FakeTime) -> None:
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN"))

    events = await face.events("Hi")

    assert isinstance(events[-1], Finished)
    assert len(server.seen) == 2
    assert time.slept_s == [0.5]


async def test_a_stream_that_is_refused_unseen_is_tried_again(face: Face, time: FakeTime) -> None:
    """HTTP/2 refuses streams over the connection's limit without a status of the server."""
    async with refusing_streams() as address:
        refused = type(face)(address, time)
        with pytest.raises(Unavailable) as caught:
            await refused.events("Hi")
        await refused.close()

    assert caught.value.reason == ""
    assert len(time.slept_s) == POLICY.max_attempts - 1


@pytest.mark.parametrize("after", [None, accept])
async def test_unavailable_without_a_reason_is_tried_again(
    face: Face, server: ScriptedServer, time: FakeTime, after: Script | None
) -> None:
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "", after=after))

    events = await face.events("Hi")

    assert isinstance(events[-1], Finished)
    assert time.slept_s == [0.5]


async def test_tried_again_after_accepted_begins_anew(
    face: Face, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN", after=accept))

    events = await face.events("Hi")

    assert [type(event) for event in events[:2]] == [Accepted, Accepted]
    assert [event.sequence for event in events[:3]] == [0, 0, 1]


async def test_never_tried_again_after_output(
    face: Face, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(
        failing(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN", after=accept_and_speak)
    )
    events: list[Event] = []

    with pytest.raises(EngineDown) as caught:
        await face.events("Hi", into=events)

    assert [type(event) for event in events] == [Accepted, Tokens]
    assert caught.value.request_id == "r-1"
    assert len(server.seen) == 1
    assert time.slept_s == []


async def test_an_echoed_prompt_is_output(face: Face, server: ScriptedServer) -> None:
    async def echo(call: ServedCall) -> None:
        await call.accepted()
        await call.send(pb.GenerateResponse(sequence=1, prompt=pb.PromptEcho(text="Hi")))

    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN", after=echo))
    events: list[Event] = []

    with pytest.raises(EngineDown):
        await face.events("Hi", into=events)

    assert isinstance(events[-1], PromptEcho)
    assert len(server.seen) == 1


async def test_attempts_end(face: Face, server: ScriptedServer, time: FakeTime) -> None:
    server.scripts.extend([failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 9)

    with pytest.raises(Draining):
        await face.events("Hi")

    assert len(server.seen) == POLICY.max_attempts
    assert time.slept_s == [0.5, 1.0]


@pytest.mark.parametrize("way", ["trailer", "detail"])
async def test_pushback_is_waited_for(
    face: Face, server: ScriptedServer, time: FakeTime, way: str
) -> None:
    details = (retry_info(7.5),) if way == "detail" else ()
    trailers = (("grpc-retry-pushback-ms", "7500"),) if way == "trailer" else ()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.scripts.append(failing(code, "QUEUE_FULL", *details, trailers=trailers))

    await face.events("Hi")

    assert time.slept_s == [7.5]


async def test_pushback_beyond_the_deadline_is_told_at_once(
    face: Face, server: ScriptedServer, time: FakeTime
) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.scripts.append(failing(code, "QUEUE_FULL", retry_info(20.0)))

    with pytest.raises(QueueFull) as caught:
        await face.events("Hi", deadline_s=20.0)

    assert caught.value.retry_after_s == 20.0
    assert time.slept_s == []


async def test_server_may_refuse_retries(
    face: Face, server: ScriptedServer, time: FakeTime
) -> None:
    trailers = (("grpc-retry-pushback-ms", "-1"),)
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "DRAINING", trailers=trailers))

    with pytest.raises(Draining):
        await face.events("Hi")

    assert time.slept_s == []


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (grpc.StatusCode.INTERNAL, "EXECUTOR_REQUEST_FAILED", ExecutorRequestFailed),
        (grpc.StatusCode.INVALID_ARGUMENT, "EXECUTOR_REFUSED", ExecutorRefused),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_STALLED", ReaderStalled),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "", CallCancelled),
    ],
)
async def test_failures_in_mid_stream(
    face: Face, server: ScriptedServer, code: grpc.StatusCode, reason: str, error: type[Exception]
) -> None:
    server.scripts.append(failing(code, reason, after=accept_and_speak))

    with pytest.raises(error):
        await face.events("Hi")


async def test_a_lost_message_breaks_the_stream(face: Face, server: ScriptedServer) -> None:
    async def lose_one(call: ServedCall) -> None:
        await call.accepted()
        call.next_sequence += 1
        await call.tokens("late")
        await call.wait_for_cancel()

    server.scripts.append(lose_one)

    with pytest.raises(StreamBroken, match="expected message 1, got 2"):
        await face.events("Hi")

    await asyncio.wait_for(server.seen[0].cancelled.wait(), 60)


async def test_an_end_without_finished_breaks_the_stream(
    face: Face, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(accept_and_speak)

    with pytest.raises(StreamBroken, match="without `finished`"):
        await face.events("Hi")

    assert time.slept_s == []


async def test_a_status_after_finished_is_the_outcome(face: Face, server: ScriptedServer) -> None:
    async def finish(call: ServedCall) -> None:
        await accept_and_speak(call)
        await call.finished()

    server.scripts.append(failing(grpc.StatusCode.INTERNAL, "INTERNAL", after=finish))
    events: list[Event] = []

    with pytest.raises(Exception, match="INTERNAL"):
        await face.events("Hi", into=events)

    assert not any(isinstance(event, Finished) for event in events)


async def test_leaving_early_cancels_the_request(face: Face, server: ScriptedServer) -> None:
    server.scripts.append(speak_and_wait)

    await face.leave_after_output("Hi")

    await asyncio.wait_for(server.seen[0].cancelled.wait(), 60)
