"""Runs the servers that Penstock's delivery is compared with, or the source of their tokens.

Each server sends one token per message (of `Generate` over gRPC) with minimal overhead; all Python
servers use uvloop. The producer sends its server one frame per step: token k of every stream
is due at T0 + k * step, regardless of earlier delays. Roles of this program:

    producer SOCKET STREAMS STEP_S SCHEDULE_FILE    the source of tokens; ends with its server
    aio SOCKET PORT      grpc.aio: a list and a future for each stream
    lines SOCKET PORT    asyncio TCP: one line and one send per token
    events SOCKET PORT   FastAPI on uvicorn (httptools): server-sent events

A frame is (step, number of tokens, tokens), little-endian 32-bit integers; a server sends one byte
when a stream opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

from usage import print_usage

_HEADER = struct.Struct("<II")
_VOCABULARY_SIZE = 32_000
_PIECES = [f" w{token % 1000}" for token in range(_VOCABULARY_SIZE)]
_HEAD_START_S = 0.1
_SEND_BUFFER_BYTES = 4 << 20
_SERVICE = "penstock.v1.GenerationService"
READY = "ready"


def produce(path: str, num_streams: int, step_s: float, schedule: Path) -> None:
    """Send tokens to one server on an absolute schedule; first write the start time to
    `schedule`.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        print(READY, flush=True)
        server, _ = listener.accept()
    with server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        num_open = 0
        while num_open < num_streams:
            num_new = len(server.recv(4096))
            if num_new == 0:
                return
            num_open += num_new
        start_ns = time.monotonic_ns() + round(_HEAD_START_S * 1e9)
        schedule.write_text(str(start_ns), encoding="ascii")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for step in itertools.count():
                frame = _frame(step, num_streams)
                due_ns = start_ns + round(step * step_s * 1e9)
                time.sleep(max(0, due_ns - time.monotonic_ns()) * 1e-9)
                server.sendall(frame)


def _frame(step: int, num_streams: int) -> bytes:
    tokens = [(step * 977 + stream * 31) % _VOCABULARY_SIZE for stream in range(num_streams)]
    return _HEADER.pack(step, num_streams) + struct.pack(f"<{num_streams}I", *tokens)


class Source(asyncio.Protocol):
    """The server's end of the producer's socket; passes the token of each step to every stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._sinks: list[Callable[[int], None]] = []
        self._transport: Any = None
        self.is_lost = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, path: str) -> Source:
        """Return a connected source."""
        _, source = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return source

    def add(self, sink: Callable[[int], None]) -> None:
        """Add a stream that receives tokens from now on."""
        self._sinks.append(sink)
        self._transport.write(b"+")

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's name)
        self.is_lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            _, num_tokens = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + 4 * num_tokens
            if len(self._buffer) < end:
                return
            tokens = struct.unpack_from(f"<{num_tokens}I", self._buffer, _HEADER.size)
            del self._buffer[:end]
            for sink, token in zip(self._sinks, tokens, strict=False):
                sink(token)


class Outbox:
    """A queue of the tokens of one stream that are not sent yet."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, token: int) -> None:
        self._tokens.append(token)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[int]:
        """Wait until there is a token; remove and return all tokens."""
        if not self._tokens:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._tokens = self._tokens, []
        return tokens


async def serve_aio(path: str, port: int) -> None:
    """Serve `Generate` with only grpc.aio and the generated code."""
    import grpc
    import grpc.aio

    from penstock.v1 import generation_service_pb2 as pb
    from penstock.v1 import output_pb2

    source = await Source.connect(path)

    async def generate(
        request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        del request, context
        outbox, sequence = Outbox(), 0
        source.add(outbox.push)
        while True:
            for token in await outbox.take():
                tokens = output_pb2.TokenDelta(text=_PIECES[token], num_tokens=1)
                yield pb.GenerateResponse(sequence=sequence, tokens=tokens)
                sequence += 1

    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler(_SERVICE, {"Generate": handler})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    _started()
    await source.is_lost


async def serve_lines(path: str, port: int) -> None:
    """Serve plain TCP, one line and one send per token: the lower bound for asyncio."""
    source = await Source.connect(path)

    class Lines(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            del data
            source.add(self._send)

        def _send(self, token: int) -> None:
            if not self._transport.is_closing():
                self._transport.write(b"1%s\n" % _PIECES[token].encode())

    await asyncio.get_running_loop().create_server(Lines, "127.0.0.1", port, backlog=4096)
    _started()
    await source.is_lost


async def serve_events(path: str, port: int) -> None:
    """Serve server-sent events with FastAPI and uvicorn."""
    # Not a dependency, so a type checker may not find it.
    fastapi: Any = importlib.import_module("fastapi")
    responses: Any = importlib.import_module("fastapi.responses")
    uvicorn: Any = importlib.import_module("uvicorn")
    source = await Source.connect(path)
    app = fastapi.FastAPI()

    async def events() -> AsyncGenerator[str]:
        outbox, sequence = Outbox(), 0
        source.add(outbox.push)
        while True:
            for token in await outbox.take():
                data = {"sequence": sequence, "text": _PIECES[token], "num_tokens": 1}
                yield f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
                sequence += 1

    async def generate(body: dict[str, str]) -> Any:
        del body
        return responses.StreamingResponse(events(), media_type="text/event-stream")

    app.post("/generate", response_model=None)(generate)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, http="httptools", log_level="warning", backlog=4096
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (it has no event for that)
        await asyncio.sleep(0.01)
    _started()
    await source.is_lost
    serving.cancel()


def _started() -> None:
    # As Penstock does: objects from before the first request are exempt from garbage collection.
    gc.collect()
    gc.freeze()
    print(READY, flush=True)


def main(role: str, path: str, *rest: str) -> None:
    """Run the process of `role` with its arguments."""
    if role == "producer":
        num_streams, step_s, schedule = rest
        produce(path, int(num_streams), float(step_s), Path(schedule))
        return
    import uvloop

    serve = {"aio": serve_aio, "lines": serve_lines, "events": serve_events}[role]
    uvloop.run(serve(path, int(rest[0])))


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=3)
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
