"""Runs one front, and a series of engines that die, in one process; the test runs the engines'
steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import Executor
from penstock.server.front.config import FrontConfig
from penstock.server.front.front import Front
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import CallTimes
from penstock.server.rpc.mapping_out import ResponseEncoder, encoder_for
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.link import EngineLink, hello
from support.resumed import unbroken

MAX_TURNS = 5000
_MAX_STEPS_UNTIL_IDLE = 4


@dataclass(frozen=True)
class Death:
    """The death of an engine, `num_turns` + 1 turns after its start. Before it dies, the engine
    runs `num_lost_steps` further steps, whose events are lost.
    """

    num_turns: int
    num_lost_steps: int = 0


@dataclass
class Delivered:
    """The messages of one request's stream. `rejected`: the reason if it failed, otherwise ""."""

    messages: list[pb.GenerateResponse] = field(default_factory=list[pb.GenerateResponse])
    rejected: str = ""

    def check_order(self) -> None:
        """Check that sequence numbers have no gap, that the first message is the acceptance, and
        that the last message is the end, unless the request failed.
        """
        if self.rejected:
            assert [one.sequence for one in self.messages] == list(range(len(self.messages)))
            assert self.messages[0].HasField("accepted")
        else:
            assert unbroken(self.messages)

    def texts(self) -> dict[int, str]:
        """Return the text of each output by output index; the index -1 has the prompt's text."""
        texts: dict[int, str] = {}
        for index, piece in self._pieces():
            texts[index] = texts.get(index, "") + piece.text
        return texts

    def content(self) -> object:
        """Return the parts that must not depend on deaths: prompt, tokens, ends. The sizes of
        messages and the times may depend on them.
        """
        records: dict[int, list[str]] = {}
        for index, piece in self._pieces():
            records.setdefault(index, []).extend(map(str, piece.records))
        num_tokens = Counter[int]()
        for message in self.messages:
            num_tokens[message.tokens.output_index] += message.tokens.num_tokens
        finished = self.messages[-1].finished
        usage = (finished.usage.num_prompt_tokens, finished.usage.num_completion_tokens)
        ends = [str(end) for end in finished.outputs]
        return (self.texts(), records, num_tokens, ends, usage, self.rejected)

    def _pieces(self) -> Iterator[tuple[int, Any]]:
        for message in self.messages:
            if message.HasField("prompt"):
                yield -1, message.prompt
            elif message.HasField("tokens"):
                yield message.tokens.output_index, message.tokens


class RestartingService:
    """A front and its current engine; each engine has a new executor from `make_executor`."""

    def __init__(
        self,
        text: ModelText,
        make_executor: Callable[[], Executor],
        scheduler: SchedulerConfig,
        config: FrontConfig | None = None,
    ) -> None:
        self.front = Front(text, config or FrontConfig(max_replays=1000))
        self._make_executor = make_executor
        self._scheduler = scheduler
        self._epoch = 0
        self._delivered: dict[LiveRequest, tuple[Delivered, ResponseEncoder]] = {}

    async def begin_life(self) -> None:
        """Start an engine, connect the front, and let it submit the requests that wait."""
        self._epoch += 1
        executor = self._make_executor()
        self._core = Engine(executor, self._scheduler, time.monotonic)
        self._link = EngineLink(self._core, hello(self._epoch, executor.info, self._scheduler))
        self._port = self._link.port(self.front.config.front_id)
        self.front.port = self._port
        await self._link.connect(self._port, self.front)
        await self._settle()

    async def open(self, generation: GenerationSpec) -> Delivered:
        """Open a request; return its stream, to which later messages are added."""
        request = await self.front.open(generation, CallTimes(arrival_s=time.monotonic()))
        delivered = Delivered()
        encoder = encoder_for(generation.output.chunks, self.front.config)
        self._delivered[request] = (delivered, encoder)
        await self._settle()
        return delivered

    @property
    def is_idle(self) -> bool:
        return not self._delivered

    async def turn(self) -> None:
        self._link.pump(1)
        self._core.check_integrity()
        await self._settle()
        self._read()

    async def die(self, num_lost_steps: int) -> None:
        """Run steps whose events are not sent, close the engine, and start another."""
        for _ in range(num_lost_steps):
            if self._core.has_work:
                self._core.step()
        await self._lose_engine()
        self._read()
        await self.begin_life()

    async def close(self) -> None:
        for _ in range(_MAX_STEPS_UNTIL_IDLE):
            self._link.pump(1)
        assert not self._core.has_work
        self._core.check_integrity()
        await self._lose_engine()

    async def _lose_engine(self) -> None:
        self._link.close()
        self._core.close()
        while self._port.is_up:  # noqa: ASYNC110 - it has read what was sent before
            await asyncio.sleep(0)
        await self._port.close()

    async def _settle(self) -> None:
        """Run until each side has received what the other has sent."""
        for _ in range(4):
            self._link.pump(0)
            await asyncio.sleep(0)

    def _read(self) -> None:
        for request, (delivered, encoder) in list(self._delivered.items()):
            batch = request.stream.take_due()
            for data in encoder.encode(batch):
                delivered.messages.append(pb.GenerateResponse.FromString(data))
            if request.stream.is_drained:
                failure = request.stream.failure
                delivered.rejected = "" if failure is None else failure.reason.value
                self.front.release(request)
                del self._delivered[request]


async def play(
    service: RestartingService,
    generations: Sequence[GenerationSpec],
    deaths: Sequence[Death],
    *,
    turns_between: int = 0,
) -> list[Delivered]:
    """Run all requests to their end, while engines die as `deaths` specifies, in order; return the
    streams.

    Requests are submitted `turns_between` turns apart.
    """
    await service.begin_life()
    delivered: list[Delivered] = []
    waiting, dying = list(generations), list(deaths)
    num_turns = 0
    for turn in range(MAX_TURNS):
        while waiting and turn >= len(delivered) * turns_between:
            delivered.append(await service.open(waiting.pop(0)))
        await service.turn()
        num_turns += 1
        if dying and num_turns > dying[0].num_turns:
            await service.die(dying.pop(0).num_lost_steps)
            num_turns = 0
        if service.is_idle and not waiting:
            break
    else:
        raise AssertionError("the requests do not end")
    await service.close()
    for one in delivered:
        one.check_order()
    return delivered
