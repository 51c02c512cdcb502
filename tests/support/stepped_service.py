"""Fronts on real sockets over a real engine in this process, stepped by the test or on a thread.

The executor is the simulated one in strict mode, which rejects batches that a device would compute
wrongly. The engine's integrity is checked after every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
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
from penstock.server.ipc.unix_port import UnixEnginePort
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.rpc.gateway_service import GatewayServiceMaker
from penstock.server.rpc.options import ServerOptions
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.fronts import collect
from support.generate_requests import greedy
from support.link import EngineLink, hello
from support.timeout import TEST_TIMEOUT_S


class WatchedEngine(Engine):
    """Records the keys of cancelled requests, and the number of computed tokens of each request;
    checks the engine's integrity after every step.
    """

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
    """A front and its engine, which runs only when the test steps it. `num_steps`: number of steps
    that had work.
    """

    engine: WatchedEngine
    link: EngineLink
    server: FrontServer
    stub: pb_grpc.GenerationServiceAsyncStub
    channel: grpc.aio.Channel
    address: str
    num_steps: int = 0

    @property
    def front(self) -> Front:
        return self.server.front

    @property
    def port(self) -> UnixEnginePort:
        port = self.front.port
        assert isinstance(port, UnixEnginePort)
        return port

    @property
    def num_used_blocks(self) -> int:
        return self.engine.cache.pool.num_used

    def is_clean(self) -> bool:
        """Return whether no request is live in the engine and no cache block is in use."""
        return not self.engine.requests and not self.num_used_blocks and not len(self.engine.queue)

    def step(self, count: int = 1) -> int:
        """Read the fronts' commands and run up to `count` steps; return how many had work."""
        done = self.link.pump(count)
        self.num_steps += done
        return done

    def read_commands(self) -> None:
        """Read the fronts' commands without a step."""
        self.link.pump(0)

    async def until(self, is_so: Callable[[], bool], *, steps: bool = False) -> None:
        """Yield to the running event loop until the condition holds and the front has no unsent
        bytes for the engine. `steps`: also run a step of the engine in each iteration.
        """
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while not is_so() or self.port.num_unsent_bytes:
                if steps:
                    self.step()
                await asyncio.sleep(0)

    async def until_live(self, count: int) -> None:
        """Wait until the engine has exactly `count` requests."""

        def is_so() -> bool:
            self.read_commands()
            return len(self.engine.requests) == count

        await self.until(is_so)

    async def until_released(self) -> None:
        """Wait until the front has released every request and has reported it to the engine."""
        await self.until(lambda: self.server.num_live_requests == 0)

    async def disconnect(self) -> None:
        """Close the front's connection to the engine, as the front's death does."""
        await self.port.close()
        self.read_commands()

    async def connect(self) -> None:
        """Wait until the front has detected the loss of its engine, and connect the front to the
        engine of `link`.
        """
        await self.until(lambda: not self.port.is_up)
        await self.port.close()
        self.front.port = port = self.link.port(self.front.config.front_id)
        await self.link.connect(port, self.server)

    async def end_of(self, call: Any) -> list[pb.GenerateResponse]:
        """Read a call to its end while the engine runs; raise the error of the call."""
        responses: list[pb.GenerateResponse] = await self.result_of(collect(call))
        return responses

    async def result_of(self, reading: Awaitable[Any]) -> Any:
        """Run the engine until `reading` is done; return the result or raise the error of
        `reading`.
        """
        task = asyncio.ensure_future(reading)
        await self.until(task.done, steps=True)
        return task.result()


def ids_of(responses: Iterable[pb.GenerateResponse]) -> list[int]:
    return [record.id for response in responses for record in response.tokens.records]


def request(
    num_tokens: int = 8, prompt: Iterable[int] = (5, 6, 7, 8), **fields: Any
) -> pb.GenerateRequest:
    """Return a greedy request of exactly `num_tokens` output tokens, with `return_token_ids`."""
    return greedy(num_tokens, prompt, output={"return_token_ids": True}, **fields)


def stepped_engine(
    text: ModelText,
    *,
    scheduler: SchedulerConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
    epoch: int = 1,
    publishes_cache: bool = False,
    front: FrontConfig | None = None,
    **executor: Any,
) -> tuple[WatchedEngine, EngineLink]:
    """Return an engine and its connections to fronts. `executor`: as in `stepped`."""
    config = scheduler or SchedulerConfig(max_num_waiting=64)
    settings: dict[str, Any] = {
        "num_blocks": 64,
        "max_seq_len": 512,
        "max_num_seqs": 8,
        "simulated": SimulatedConfig(vocab_size=text.files.vocab_size, is_strict=True),
    }
    made = create_executor(ExecutorConfig(kind=ExecutorKind.SIMULATED, **(settings | executor)))
    engine = WatchedEngine(made, config, clock)
    bounds = front or FrontConfig()
    link = EngineLink(
        engine,
        hello(epoch, made.info, config, publishes_cache=publishes_cache),
        clock,
        cache_index=engine.enable_cache_index() if publishes_cache else None,
        kept_limits=KeptLimits(
            max_bytes=bounds.max_resume_bytes, max_unread=bounds.max_detached_requests
        ),
    )
    return engine, link


@contextlib.asynccontextmanager
async def stepped(
    text: ModelText,
    *,
    front: FrontConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    channel_options: ServerOptions = (),
    clock: Callable[[], float] = time.monotonic,
    gateway: GatewayServiceMaker | None = None,
    recorder: RequestRecorder | None = None,
    **executor: Any,
) -> AsyncGenerator[SteppedService]:
    """Start an engine, a front and a client channel. `recorder`: if given, requests are traced.
    `executor`: other fields of ExecutorConfig; by default 64 blocks of 16 tokens and 8 slots.
    """
    engine, link = stepped_engine(
        text,
        scheduler=scheduler,
        clock=clock,
        publishes_cache=gateway is not None,
        front=front,
        **executor,
    )
    server = FrontServer(
        text,
        front or FrontConfig(),
        port=link.port(1),
        clock=clock,
        gateway=gateway,
        recorder=recorder,
        is_tracing=recorder is not None,
    )
    with contextlib.closing(link):
        async with _served(server, engine, link, channel_options) as service:
            yield service


@contextlib.asynccontextmanager
async def running(
    text: ModelText, *, is_real_time: bool = False, **options: Any
) -> AsyncGenerator[SteppedService]:
    """Start a service as `stepped` does, with a larger engine that runs on a thread. `options`:
    arguments of `stepped`.
    """
    simulated = SimulatedConfig(
        vocab_size=text.files.vocab_size, is_real_time=is_real_time, is_strict=True
    )
    sizes: dict[str, Any] = {"num_blocks": 512, "max_seq_len": 1024, "simulated": simulated}
    async with stepped(text, **sizes, **options) as service:
        service.link.run()
        yield service


@contextlib.asynccontextmanager
async def another_front(service: SteppedService, **config: Any) -> AsyncGenerator[SteppedService]:
    """Start the second front of the same engine. `config`: fields of FrontConfig."""
    server = FrontServer(
        service.front.text,
        FrontConfig(front_id=2, **config),
        port=service.link.port(2),
        clock=service.front.clock,
    )
    async with _served(server, service.engine, service.link) as other:
        yield other


@contextlib.asynccontextmanager
async def _served(
    server: FrontServer, engine: WatchedEngine, link: EngineLink, options: ServerOptions = ()
) -> AsyncGenerator[SteppedService]:
    async with contextlib.AsyncExitStack() as stack:
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        channel = grpc.aio.insecure_channel(address, options=list(options))
        stub = pb_grpc.GenerationServiceStub(channel)
        service = SteppedService(engine, link, server, stub, channel, address)
        stack.push_async_callback(lambda: service.port.close())
        stack.push_async_callback(server.stop)
        await stack.enter_async_context(channel)
        await link.connect(service.port, server)
        yield service
