"""Two fronts whose engine dies and is replaced, and a client that resumes its stream.

An `Attempt` determines when the engine dies, and which front connects to the next engine last.
Everything runs in one process; client and fronts communicate over TCP.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import rich_error
from support.resumed import num_tokens_of, resumed
from support.stepped_service import SteppedService, another_front, stepped, stepped_engine

_MAX_ATTEMPTS = 60


@dataclass(frozen=True)
class Attempt:
    """One call of Resume. `front`: index of the front. `num_steps`: number of engine steps until
    the engine dies, None: it does not die. `is_late`: the other front connects to the next engine
    last. `num_messages`: maximum number of messages read.
    """

    front: int
    num_steps: int | None
    is_late: bool
    num_messages: int


class FrontPair:
    """Two fronts, and the engine to which both are connected."""

    def __init__(self, text: ModelText, fronts: list[SteppedService]) -> None:
        self.fronts = fronts
        self._text = text
        self._epoch = 1

    async def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.fronts[0].step()
            await asyncio.sleep(0)

    async def replace_engine(self, *, late: int | None = None) -> None:
        """Close the engine and start another; the front with id `late` connects last."""
        old = self.fronts[0]
        old.link.close()
        old.engine.close()
        self._epoch += 1
        engine, link = stepped_engine(self._text, epoch=self._epoch)
        for service in self.fronts:
            service.engine, service.link = engine, link
        for service in sorted(self.fronts, key=lambda one: one.front.config.front_id == late):
            await service.connect()
            await self.run_steps(5)

    async def attempt(self, got: list[pb.GenerateResponse], what: Attempt) -> str:
        """Resume after the messages in `got`, and append the new ones to it; return the error
        reason, ENGINE_DOWN or STREAM_SUPERSEDED, or "".
        """
        service = self.fronts[what.front]
        counts = num_tokens_of(got)
        call: Any = service.stub.Resume(resumed("r", next_sequence=len(got), num_received=counts))
        await service.until(lambda: service.server.num_active_calls == 1)
        if what.num_steps is not None:
            await self.run_steps(what.num_steps)
            other = self.fronts[1 - what.front].front.config.front_id
            await self.replace_engine(late=other if what.is_late else None)
        reason: str = await service.result_of(_read(call, got, what.num_messages))
        call.cancel()
        await service.until(lambda: not service.server.num_active_calls)
        return reason

    async def finish(self, got: list[pb.GenerateResponse]) -> None:
        """Resume until the stream has ended. Raises AssertionError after 60 attempts."""
        for number in range(_MAX_ATTEMPTS):
            if got and got[-1].HasField("finished"):
                return
            await self.attempt(got, Attempt(number % 2, None, is_late=False, num_messages=1000))
        raise AssertionError("the request does not end")


async def _read(call: Any, got: list[pb.GenerateResponse], num_messages: int) -> str:
    try:
        for _ in range(num_messages):
            message = await call.read()
            if message is grpc.aio.EOF:
                break
            got.append(message.response)
    except grpc.aio.AioRpcError as error:
        reason = rich_error(error).info.reason
        # In no case may the request be unknown or not resumable.
        if reason not in ("ENGINE_DOWN", "STREAM_SUPERSEDED"):
            raise
        return str(reason)
    return ""


@contextlib.asynccontextmanager
async def front_pair(text: ModelText) -> AsyncGenerator[FrontPair]:
    """Start two fronts over a first engine; check at the end that no request is left."""
    config = FrontConfig(max_replays=1000)
    async with (
        stepped(text, front=config) as first,
        another_front(first, max_replays=1000) as second,
    ):
        site = FrontPair(text, [first, second])
        yield site
        for service in site.fronts:
            assert not service.server.num_live_requests
        await site.run_steps(5)
        assert first.is_clean()
        first.link.close()
