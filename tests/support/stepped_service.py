"""A front on a real socket over a real engine whose steps the test controls.

Contains the site and counts the steps. The executor is the strict simulated one: it rejects what a
device would compute wrongly. The engine's accounting is checked after every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.server.engine.kept_streams import KeptLimits
from penstock.server.front.config import FrontConfig
from penstock.server.front.front import Front
from penstock.server.link.frames import EngineHello
from penstock.server.rpc.gateway_service import GatewayServiceMaker
from penstock.server.rpc.options import ServerOptions
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.fronts import PATIENCE_S
from support.memory_link import MemoryEngine


class WatchedEngine(Engine):
    """Records the requests it was asked to cancel, and the number of computed tokens of each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cancelled: list[int] = []
        self.computed: dict[int, int] = {}

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        self.cancelled.append(key)
        return super().cancel(key, reason)

    def step(self) -> StepEvents:
        events = super().step()
        for request in self.running:
            self.computed[request.spec.key] = int(self.arrays.num_computed[request.slot])
        self.check_integrity()
        return events


@dataclass
class SteppedService:
    """`engine` runs only by `step`. `num_steps`: those that had work."""

    engine: WatchedEngine
    memory: MemoryEngine
    server: FrontServer
    stub: pb_grpc.GenerationServiceAsyncStub
    channel: grpc.aio.Channel
    address: str
    num_steps: int = field(default=0)

    @property
    def front(self) -> Front:
        return self.server.front

    @property
    def num_used_blocks(self) -> int:
        return self.engine.cache.pool.num_used

    def is_clean(self) -> bool:
        """Return whether no request is live in the engine, and none has blocks (I1 and I2)."""
        return not self.engine.requests and not self.num_used_blocks and not len(self.engine.queue)

    def step(self, count: int = 1) -> int:
        """Read the fronts' commands and do up to `count` steps; return how many had work."""
        done = self.memory.pump(count)
        self.num_steps += done
        return done

    def hear(self) -> None:
        """Read the fronts' commands without a step."""
        self.memory.pump(0)

    async def until(self, is_so: Callable[[], bool], *, steps: bool = False) -> None:
        """Run the loop until the condition holds; with `steps`, the engine too."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                if steps:
                    self.step()
                await asyncio.sleep(0)

    async def until_live(self, count: int) -> None:
        """Wait until the engine has exactly `count` requests."""

        def is_so() -> bool:
            self.hear()
            return len(self.engine.requests) == count

        await self.until(is_so)

    async def until_released(self) -> None:
        """Wait until the front has released every request and has reported it to the engine."""
        await self.until(lambda: self.server.num_live_requests == 0)

    async def end_of(self, call: Any) -> list[pb.GenerateResponse]:
        """Read a call to its end while the engine runs; raise the error of the call."""
        reading = asyncio.ensure_future(_read(call))
        await self.until(reading.done, steps=True)
        return reading.result()


async def _read(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


def ids_of(responses: Iterable[pb.GenerateResponse]) -> list[int]:
    """Return the token ids of a stream that requested them."""
    return [
        record.id
        for response in responses
        if response.WhichOneof("event") == "tokens"
        for record in response.tokens.records
    ]


def request(
    num_tokens: int = 8,
    prompt: Iterable[int] = (5, 6, 7, 8),
    *,
    request_id: str | None = None,
) -> pb.GenerateRequest:
    """Return a greedy request of exactly `num_tokens` output tokens, which are reported by id."""
    message = pb.GenerateRequest(request_id=request_id)
    message.token_prompt.ids.extend(prompt)
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = num_tokens
    message.stopping.ignore_eos = True
    message.output.return_token_ids = True
    return message


def stepped_engine(
    text: ModelText,
    *,
    scheduler: SchedulerConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
    epoch: int = 1,
    publishes_cache: bool = False,
    front: FrontConfig | None = None,
    **executor: Any,
) -> tuple[WatchedEngine, MemoryEngine]:
    """Return an engine, and the link by which fronts reach it. `executor`: as of `stepped`."""
    config = scheduler or SchedulerConfig(max_num_waiting=64)
    settings: dict[str, Any] = {
        "num_blocks": 64,
        "max_seq_len": 512,
        "max_num_seqs": 8,
        "simulated": SimulatedConfig(vocab_size=text.files.vocab_size, is_strict=True),
    }
    made = create_executor(ExecutorConfig(kind=ExecutorKind.SIMULATED, **(settings | executor)))
    engine = WatchedEngine(made, config, clock)
    hello = EngineHello(
        epoch=epoch,
        model="tiny",
        executor=made.info,
        max_num_waiting=config.max_num_waiting,
        max_num_waiting_tokens=config.max_num_waiting_tokens,
        publishes_cache=publishes_cache,
    )
    cache_index = engine.enable_cache_index() if publishes_cache else None
    bounds = front or FrontConfig()
    memory = MemoryEngine(
        engine,
        hello,
        clock,
        cache_index=cache_index,
        kept_limits=KeptLimits(
            max_bytes=bounds.max_resume_bytes, max_unread=bounds.max_detached_requests
        ),
    )
    return engine, memory


@contextlib.asynccontextmanager
async def stepped(
    text: ModelText,
    *,
    front: FrontConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    channel_options: ServerOptions = (),
    clock: Callable[[], float] = time.monotonic,
    gateway: GatewayServiceMaker | None = None,
    **executor: Any,
) -> AsyncGenerator[SteppedService]:
    """Start the site. `executor`: more fields of ExecutorConfig; by default 64 blocks of 16 tokens,
    8 slots.
    """
    engine, memory = stepped_engine(
        text,
        scheduler=scheduler,
        clock=clock,
        publishes_cache=gateway is not None,
        front=front,
        **executor,
    )
    port = memory.port(1)
    server = FrontServer(text, front or FrontConfig(), port=port, clock=clock, gateway=gateway)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(memory.close)
        bound = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop)
        await port.start(server)
        memory.pump(0)
        await port.wait_up()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{bound}", options=list(channel_options))
        await stack.enter_async_context(channel)
        stub = pb_grpc.GenerationServiceStub(channel)
        yield SteppedService(engine, memory, server, stub, channel, f"127.0.0.1:{bound}")
