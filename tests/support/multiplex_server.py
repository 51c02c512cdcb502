"""A real gRPC server whose Multiplex calls the test answers itself, request by request.

Contains the transport and the requests seen. Scripts answer the requests, as in
`scripted_server.py`; the default is `say_hello`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

import penstock.v1 as pb
from support.scripted_server import error_info, finished_message


class ServedRequest:
    """One request of a Multiplex call as the server sees it, with methods to answer it."""

    def __init__(self, call: "ServedMultiplex", submit: pb.MultiplexSubmit) -> None:
        self.call = call
        self.submit = submit
        self.key = submit.key
        self.cancelled = asyncio.Event()
        self.num_credit_tokens = submit.num_credit_tokens
        self.credited = asyncio.Condition()
        self.next_sequence = 0

    async def send(self, **event: Any) -> None:
        response = pb.GenerateResponse(sequence=self.next_sequence, **event)
        self.next_sequence += 1
        await self.call.send(pb.MultiplexEvent(key=self.key, response=response))

    async def accepted(self, request_id: str = "") -> None:
        request_id = request_id or self.submit.generation.request_id or f"r-{self.key}"
        await self.send(accepted=pb.RequestAccepted(request_id=request_id, model="demo"))

    async def tokens(self, text: str, num_tokens: int = 1) -> None:
        await self.send(tokens=pb.TokenDelta(text=text, num_tokens=num_tokens))

    async def finished(self) -> None:
        await self.send(finished=finished_message(2))

    async def fail(self, code: grpc.StatusCode, message: str, *details: Message) -> None:
        status = Status(code=code.value[0], message=message)
        for detail in details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        await self.call.send(pb.MultiplexEvent(key=self.key, error=status))

    async def spend(self, num_tokens: int) -> None:
        """Wait until that much credit is available, and use it."""
        async with self.credited:
            await self.credited.wait_for(lambda: self.num_credit_tokens >= num_tokens)
            self.num_credit_tokens -= num_tokens

    async def add_credit(self, num_tokens: int) -> None:
        async with self.credited:
            self.num_credit_tokens += num_tokens
            self.credited.notify_all()


class ServedMultiplex:
    """One Multiplex call."""

    def __init__(self, context: Any) -> None:
        self.peer: str = context.peer()
        self.metadata = dict(context.invocation_metadata() or ())
        self.requests: dict[int, ServedRequest] = {}
        self.is_half_closed = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._context = context
        self._writing = asyncio.Lock()

    async def send(self, *events: pb.MultiplexEvent) -> None:
        async with self._writing:
            await self._context.write(pb.MultiplexResponse(events=events))


Script = Callable[[ServedRequest], Awaitable[None]]


async def say_hello(request: ServedRequest) -> None:
    await request.accepted()
    await request.tokens("Hello, ")
    await request.tokens("world")
    await request.finished()


async def speak_and_wait(request: ServedRequest) -> None:
    """Send some output, then nothing; on a cancel send the end that the contract defines."""
    await request.accepted()
    await request.tokens("begun")
    await request.cancelled.wait()
    await request.finished()


async def arrived(server: "MultiplexServer") -> ServedRequest:
    return await asyncio.wait_for(server.arrived.get(), 60)


async def until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)


def failing(
    code: grpc.StatusCode, reason: str, *details: Any, after: "Script | None" = None
) -> "Script":
    """Return a script that fails, after running `after` if given."""

    async def script(request: ServedRequest) -> None:
        if after is not None:
            await after(request)
        await request.fail(code, "scripted", error_info(reason), *details)

    return script


async def accept_and_speak(request: ServedRequest) -> None:
    await request.accepted()
    await request.tokens("begun")


if TYPE_CHECKING:
    _Servicer = object
else:

    class _Servicer(pb.GenerationServiceServicer):
        """Answers UNIMPLEMENTED to methods that this server does not implement."""


class MultiplexServer(_Servicer):
    """Runs the scripts in order, one for each request, and `say_hello` after the last."""

    def __init__(self) -> None:
        self.scripts: deque[Script] = deque()
        self.refusals: deque[tuple[grpc.StatusCode, str]] = deque()
        self.calls: list[ServedMultiplex] = []
        self.requests: list[ServedRequest] = []
        self.arrived: asyncio.Queue[ServedRequest] = asyncio.Queue()
        self.cancelled_ids: list[str] = []
        self.cut = asyncio.Event()
        self.address = ""

    async def Multiplex(self, requests: Any, context: Any) -> None:
        if self.refusals:
            await context.abort(*self.refusals.popleft())
        call = ServedMultiplex(context)
        self.calls.append(call)
        tasks: set[asyncio.Task[None]] = set()
        try:
            reading = asyncio.create_task(self._read(call, requests, tasks))
            cut = asyncio.create_task(self.cut.wait())
            await asyncio.wait({reading, cut}, return_when=asyncio.FIRST_COMPLETED)
            if self.cut.is_set():
                self.cut.clear()
                reading.cancel()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            cut.cancel()
            await reading
            call.is_half_closed.set()
            if tasks:
                await asyncio.wait(tasks)
        finally:
            call.has_ended.set()
            for task in tasks:
                task.cancel()

    async def _read(self, call: ServedMultiplex, commands: Any, tasks: set[Any]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "submit":
                    request = ServedRequest(call, command.submit)
                    call.requests[request.key] = request
                    self.requests.append(request)
                    self.arrived.put_nowait(request)
                    script = self.scripts.popleft() if self.scripts else say_hello
                    tasks.add(asyncio.create_task(script(request)))  # type: ignore[arg-type]  # a coroutine
                case "cancel":
                    call.requests[command.cancel.key].cancelled.set()
                case _:
                    credit = command.credit
                    await call.requests[credit.key].add_credit(credit.num_credit_tokens)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.cancelled_ids.append(request.request_id)
        return pb.CancelResponse(state=pb.RequestState.REQUEST_STATE_PROCESSING)


@asynccontextmanager
async def multiplex_server(
    options: tuple[tuple[str, int], ...] = (),
) -> AsyncGenerator[MultiplexServer, None]:
    """Serve on 127.0.0.1 during the block. `options`: gRPC channel arguments."""
    servicer = MultiplexServer()
    server = grpc.aio.server(options=options)
    pb.add_GenerationServiceServicer_to_server(cast(Any, servicer), server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)
