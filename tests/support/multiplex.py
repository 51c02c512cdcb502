"""Commands of a Multiplex call, and a call over a transport that the test controls."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from penstock.server.front.config import FrontConfig
from penstock.server.front.front import Front
from penstock.server.rpc.handlers import CallAccounts, Context, HandlerWrapper
from penstock.server.rpc.large_messages import LargeMessageQueue
from penstock.server.rpc.multiplex_service import MultiplexService
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import ScriptedPort, rich_status
from support.timeout import TEST_TIMEOUT_S


def submit(
    key: int,
    *,
    text: str = "hello",
    credit: int | None = None,
    edit: Callable[[pb.GenerateRequest], object] | None = None,
) -> pb.MultiplexRequest:
    message = pb.MultiplexRequest()
    message.submit.key = key
    message.submit.generation.text_prompt.text = text
    if credit is not None:
        message.submit.num_credit_tokens = credit
    if edit is not None:
        edit(message.submit.generation)
    return message


def cancel(key: int) -> pb.MultiplexRequest:
    return pb.MultiplexRequest(cancel=pb.MultiplexCancel(key=key))


def credit(key: int, num_tokens: int) -> pb.MultiplexRequest:
    return pb.MultiplexRequest(credit=pb.MultiplexCredit(key=key, num_credit_tokens=num_tokens))


def kind(event: pb.MultiplexEvent) -> str:
    if event.WhichOneof("outcome") == "error":
        return rich_status(event.error).info.reason
    return event.response.WhichOneof("event") or ""


class FakeContext:
    """The server's side of a call, without gRPC. While `is_open` is not set, writes block.
    `num_unread`: commands that the server has not read.
    """

    def __init__(self) -> None:
        self.messages: list[pb.MultiplexResponse] = []
        self.has_metadata = False
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._commands: asyncio.Queue[Any] = asyncio.Queue()
        self.num_unread = 0

    def send(self, *commands: pb.MultiplexRequest | bytes) -> None:
        for command in commands:
            self.num_unread += 1
            self._commands.put_nowait(
                command if isinstance(command, bytes) else command.SerializeToString()
            )

    def half_close(self) -> None:
        self._commands.put_nowait(grpc.aio.EOF)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def send_initial_metadata(self, metadata: object) -> None:
        self.has_metadata = True

    async def read(self) -> Any:
        data = await self._commands.get()
        self.num_unread -= 1
        return data

    async def write(self, message: bytes) -> None:
        await self.is_open.wait()
        self.messages.append(pb.MultiplexResponse.FromString(message))

    def events(self, key: int | None = None) -> list[pb.MultiplexEvent]:
        """Return the events sent so far, for all requests or the one with this key."""
        return [
            event
            for message in self.messages
            for event in message.events
            if key is None or event.key == key
        ]

    def kinds(self, key: int) -> list[str]:
        return [kind(event) for event in self.events(key)]

    def text(self, key: int) -> str:
        return "".join(event.response.tokens.text for event in self.events(key))


@dataclass
class MultiplexHarness:
    """A running call over a front whose engine the test controls."""

    front: Front
    port: ScriptedPort
    wire: FakeContext
    task: asyncio.Task[None]

    async def settle(self) -> None:
        """Run 20 iterations of the event loop. Then every task has finished or is blocked, because
        none waits for a clock or a socket.
        """
        for _ in range(20):
            await asyncio.sleep(0)

    def token(self, letter: str) -> int:
        ids: list[int] = self.front.text.tokenizer.encode(letter, add_special_tokens=False).tolist()
        assert len(ids) == 1
        return ids[0]


@asynccontextmanager
async def multiplex_call(
    text: ModelText,
    config: FrontConfig | None = None,
    *,
    clock: Callable[[], float] = lambda: 1000.0,
    large_messages: LargeMessageQueue | None = None,
) -> AsyncGenerator[MultiplexHarness]:
    """Start a call whose client has sent nothing yet."""
    port = ScriptedPort()
    front = Front(text, config or FrontConfig(), port=port, clock=clock)
    port.listener = front
    port.come_up()
    wrapper = HandlerWrapper(
        retry_after_s=1.0,
        on_internal_error=lambda: setattr(
            front.counters, "num_internal_errors", front.counters.num_internal_errors + 1
        ),
        random=lambda: 0.5,
    )
    wire = FakeContext()
    accounts = CallAccounts(front, "penstock.v1.GenerationService")
    service = MultiplexService(front, wrapper, accounts, large_messages=large_messages)
    handling = service.multiplex(cast(Context, wire))
    task = asyncio.ensure_future(handling)
    try:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            yield MultiplexHarness(front, port, wire, task)
    finally:
        task.cancel()
        await asyncio.wait([task])
