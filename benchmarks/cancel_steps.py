"""Measures the time from a client's cancel until the KV blocks of the request are free, in engine
steps and seconds.

Runs a service in one process on a real socket, so that it can count the engine's steps after the
front-end process reports the cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from engine_on_socket import engine_on_socket
from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig, SimulatedPace
from penstock.executor.create import create_executor
from penstock.executor.models import resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.link.unix_port import UnixEnginePort
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from services import RunFailed
from survival_streams import request

STEP_S = 0.01
_NUM_CALLERS = 32
_MAX_LOOKS = 5000


class CountedEngine(Engine):
    """An engine that counts its steps and records when the blocks of a cancelled request were
    freed.

    `asked`: by request key, the number of steps that had run when its front process reported the
    cancel. `freed`: by request id, the number of steps from then until its blocks were freed, and
    the time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_turns = 0
        self.asked: dict[int, int] = {}
        self.freed: dict[str, tuple[int, float]] = {}
        self._leaving: dict[int, str] = {}

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Cancel a request, and record it to detect when its blocks are freed."""
        request = self.requests.get(key)
        if request is not None:
            self._leaving[key] = request.spec.request_id
        is_known = super().cancel(key, reason)
        self._look()
        return is_known

    def step(self) -> StepEvents:
        events = super().step()
        self.num_turns += 1
        self._look()
        return events

    def _look(self) -> None:
        arrays = self.arrays
        for key in tuple(self._leaving):
            if key not in arrays.key:
                num_steps = self.num_turns - self.asked.pop(key, self.num_turns)
                self.freed[self._leaving.pop(key)] = (num_steps, time.monotonic())


@contextlib.asynccontextmanager
async def _service(depth: int) -> AsyncGenerator[tuple[CountedEngine, str]]:
    text = ModelText.load(resolve_model("demo"), name="demo")
    zeros = dict.fromkeys(("prefill_token_s", "decode_slot_s", "context_token_s"), 0.0)
    simulated = SimulatedConfig(
        vocab_size=text.files.vocab_size,
        pace=SimulatedPace.REAL_TIME,
        cost=CostModel(step_s=STEP_S, **zeros),
    )
    executor = create_executor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            num_blocks=4096,
            max_seq_len=1024,
            max_num_seqs=_NUM_CALLERS,
            pipeline_depth=depth,
            simulated=simulated,
        )
    )
    engine = CountedEngine(executor, SchedulerConfig(), time.monotonic)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(text.close)
        port = UnixEnginePort(stack.enter_context(engine_on_socket(engine, executor)), 1)
        stack.push_async_callback(port.close)
        say_cancel = port.cancel

        def cancel(keys: tuple[int, ...], reason: FinishReason) -> None:
            engine.asked.update(dict.fromkeys(keys, engine.num_turns))
            say_cancel(keys, reason)

        port.cancel = cancel  # type: ignore[method-assign] # to see when it is called
        server = FrontServer(text, FrontConfig(), port=port)
        bound = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop)
        await port.start(server)
        await port.wait_up()
        yield engine, f"127.0.0.1:{bound}"


async def cancels_counted(num_cancels: int, depth: int) -> list[tuple[int, float]]:
    """Cancel requests at random times; return engine steps and seconds until their blocks are free.

    Steps count from when the front receives the cancel, seconds from when the client sends it.
    """
    found: list[tuple[int, float]] = []
    chance = random.Random(depth)
    async with _service(depth) as (engine, address), grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        async def caller(caller_index: int) -> None:
            for number in range(num_cancels // _NUM_CALLERS):
                message = request(number, 900)
                message.request_id = f"{caller_index}-{number}"
                call = stub.Generate(message)
                # after 1 message: the request is accepted, and waits or runs; after more: it
                # generates
                for _ in range(chance.randint(1, 12)):
                    await call.read()
                at_s = time.monotonic()
                call.cancel()
                for _ in range(_MAX_LOOKS):
                    if message.request_id in engine.freed:
                        break
                    await asyncio.sleep(0.001)
                if message.request_id not in engine.freed:
                    raise RunFailed("pages of a cancelled request are not free")
                num_steps, freed_s = engine.freed[message.request_id]
                found.append((num_steps, freed_s - at_s))

        await asyncio.gather(*(caller(index) for index in range(_NUM_CALLERS)))
    return found
