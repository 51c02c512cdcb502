"""Measures the time from a client's cancel until the KV blocks of the request are free, in engine
steps and seconds, and the blocks that many cancels leak.

Steps are counted on a service in one process on a real socket, from when its front (gRPC server
process) reports the cancel. `stream_memory.py` measures the memory that disconnected clients leave
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np

from engine_on_socket import engine_on_socket
from penstock.client import Client, OperationsClient
from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.create import create_executor
from penstock.executor.models import resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.ipc.unix_port import UnixEnginePort
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from report import Outcome, RunFailed, at_most, percentile_ms
from services import MEASURED, capacity, service, simulated
from stream_memory import churn
from survival_streams import prompt

STEP_S = 0.01
_NUM_COUNTED = 1600
_NUM_CALLERS = 32
_MAX_POLLS = 5000


class CountedEngine(Engine):
    """An engine that counts its steps and records when the blocks of a cancelled request were
    freed.

    `steps_at_cancel`: by request key, the number of steps that had run when its front process
    reported the cancel. `freed`: by request id, the number of steps from then until its blocks were
    freed, and the time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_steps = 0
        self.steps_at_cancel: dict[int, int] = {}
        self.freed: dict[str, tuple[int, float]] = {}
        self._cancelled: dict[int, str] = {}

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Cancel a request, and record it to detect when its blocks are freed. Returns whether the
        request exists.
        """
        request = self.requests.get(key)
        if request is not None:
            self._cancelled[key] = request.spec.request_id
        is_known = super().cancel(key, reason)
        self._record_freed()
        return is_known

    def step(self) -> StepEvents:
        events = super().step()
        self.num_steps += 1
        self._record_freed()
        return events

    def _record_freed(self) -> None:
        for key in tuple(self._cancelled):
            if key not in self.arrays.key:
                num_steps = self.num_steps - self.steps_at_cancel.pop(key, self.num_steps)
                self.freed[self._cancelled.pop(key)] = (num_steps, time.monotonic())


@contextlib.asynccontextmanager
async def _service(depth: int) -> AsyncGenerator[tuple[CountedEngine, str]]:
    text = ModelText.load(resolve_model("demo"), name="demo")
    zeros = dict.fromkeys(("prefill_token_s", "decode_slot_s", "context_token_s"), 0.0)
    config = SimulatedConfig(
        vocab_size=text.files.vocab_size,
        is_real_time=True,
        cost=CostModel(step_s=STEP_S, **zeros),
    )
    executor = create_executor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            num_blocks=4096,
            max_seq_len=1024,
            max_num_seqs=_NUM_CALLERS,
            pipeline_depth=depth,
            simulated=config,
        )
    )
    engine = CountedEngine(executor, SchedulerConfig(), time.monotonic)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(text.close)
        port = UnixEnginePort(stack.enter_context(engine_on_socket(engine, executor)), 1)
        stack.push_async_callback(port.close)
        send_cancel = port.cancel

        def cancel(keys: tuple[int, ...], reason: FinishReason) -> None:
            engine.steps_at_cancel.update(dict.fromkeys(keys, engine.num_steps))
            send_cancel(keys, reason)

        port.cancel = cancel  # type: ignore[method-assign] # to see when it is called
        server = FrontServer(text, FrontConfig(), port=port)
        bound = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop)
        await port.start(server)
        await port.wait_up()
        yield engine, f"127.0.0.1:{bound}"


async def measure_cancels(num_cancels: int, depth: int) -> list[tuple[int, float]]:
    """Cancel requests at random times; return engine steps and seconds until their blocks are free.

    Steps count from when the front reports the cancel, seconds from when the client sends it.
    Raises RunFailed if blocks are not freed.
    """
    found: list[tuple[int, float]] = []
    rng = random.Random(depth)
    async with _service(depth) as (engine, address), Client(address) as client:

        async def caller(caller_index: int) -> None:
            for number in range(num_cancels // _NUM_CALLERS):
                name = f"{caller_index}-{number}"
                events = client.generate(
                    prompt(number), request_id=name, max_tokens=900, ignore_eos=True
                )
                # After one event, the request is accepted, and waits or runs; after more, it
                # generates.
                async with aclosing(events):
                    for _ in range(rng.randint(1, 12)):
                        await anext(events)
                    at_s = time.monotonic()
                for _ in range(_MAX_POLLS):
                    if name in engine.freed:
                        break
                    await asyncio.sleep(0.001)
                else:
                    raise RunFailed("pages of a cancelled request are not free")
                num_steps, freed_s = engine.freed[name]
                found.append((num_steps, freed_s - at_s))

        await asyncio.gather(*(caller(index) for index in range(_NUM_CALLERS)))
    return found


async def used_blocks(operations: str) -> int:
    """Wait up to 10 s until no KV block is used; return the number of blocks that are still used.
    If all clients have disconnected, these blocks are leaked.
    """
    async with OperationsClient(operations) as client:
        used = -1
        for _ in range(100):
            stats = await client.get_stats()
            used = sum(model.cache.num_used_blocks for model in stats.models)
            if not used:
                break
            await asyncio.sleep(0.1)
        return used


async def cancel(options: Namespace) -> Outcome:
    """Measure how soon KV blocks are free after a cancel; then run many clients that disconnect
    after their first token.
    """
    freed = [one for depth in (1, 2) for one in await measure_cancels(_NUM_COUNTED, depth)]
    num_cancels = 100_000 if options.full else 10_000
    sizes = (*simulated(0.001), *capacity(64, 64), *MEASURED)
    with service(*sizes, has_operations=True) as serving:
        await asyncio.to_thread(churn, serving.port, num_cancels, 48, 1)
        leaked = await used_blocks(serving.operations)
    p99 = float(np.percentile([steps for steps, _ in freed], 99))
    free_ms = percentile_ms([seconds for _, seconds in freed], 99)
    return {"freed": freed, "num_cancels": num_cancels}, [
        at_most("cancel to pages free, p99", p99, 2, "steps"),
        at_most("from the client's cancel, in time, p99", free_ms, 50.0 + STEP_S * 1e3, "ms"),
        at_most(f"blocks leaked by {num_cancels:,} cancels", leaked, 0, "blocks"),
    ]
