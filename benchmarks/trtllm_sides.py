"""Runs one process of `trtllm_overhead`: an engine, or the clients of a variant.

Roles of this program:

    floor FOLDER            calls the fake of TensorRT-LLM directly
    engine FOLDER SOCKET    Penstock's engine process without a supervisor
    link SOCKET             a client of the engine's socket, without a front (gRPC server process)
    service ADDRESS         gRPC clients
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import uvloop

from engine_on_socket import MAX_NUM_WAITING, engine_loop, listening
from penstock.client import NO_RETRY, Client, TokenPrompt, Tokens
from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.executor.trtllm.package import load_package
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, StepEvents
from penstock.scheduler.request import RequestSpec, SamplingParams
from penstock.server.ipc.frames import EngineHello
from penstock.server.ipc.unix_port import UnixEnginePort
from trtllm_load import Load, LoadSummary, Records, Request, answer_loads, closed_loop, print_json
from usage import print_usage

MAX_BATCH_SIZE = 256
MAX_NUM_TOKENS = 8192
_FRONT_ID = 1


async def floor(folder: Path) -> None:
    """Run loads on the fake directly, without Penstock's scheduler and socket."""
    package = load_package(is_engine=False)
    llm = await asyncio.to_thread(
        package.build,
        model=str(folder),
        skip_tokenizer_init=True,
        max_batch_size=MAX_BATCH_SIZE,
        max_num_tokens=MAX_NUM_TOKENS,
        enable_chunked_prefill=True,
    )

    async def run(load: Load) -> LoadSummary:
        async def generate(records: Records, key: int, request: Request) -> None:
            params = package.sampling_params(
                max_tokens=request.num_tokens, end_id=-1, temperature=0.0, detokenize=False
            )
            num_seen = 0
            records.start(key)
            async for output in llm.generate_async(
                inputs=request.prompt, sampling_params=params, streaming=True
            ):
                num_tokens = len(output.outputs[0].token_ids)
                records.tokens(key, num_tokens - num_seen)
                num_seen = num_tokens
            records.end(key)

        return await closed_loop(load, generate)

    await answer_loads(run)
    await asyncio.to_thread(llm.shutdown)


def engine(folder: Path, path: Path) -> None:
    """Run the engine in the same way as the engine process, until terminated."""
    executor = create_executor(ExecutorConfig(kind=ExecutorKind.TRTLLM, model_path=folder))
    scheduler = SchedulerConfig(
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_num_waiting=MAX_NUM_WAITING,
        admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT,
    )
    with listening(Engine(executor, scheduler, time.monotonic), executor, path) as connections:
        loop = engine_loop(connections)
        gc.collect()
        gc.freeze()
        print_json({})
        loop.run()


class SocketLoad:
    """Sends a load over the engine's socket and receives events, as a front process without gRPC
    and text processing would."""

    def __init__(self, path: Path) -> None:
        self.port = UnixEnginePort(path, _FRONT_ID)
        self._next_key = _FRONT_ID << 32
        self._records: Records | None = None
        self._waiting: Iterator[Request] = iter(())
        self._seen: asyncio.Future[LoadSummary] | None = None

    async def run(self, load: Load) -> LoadSummary:
        """Run one load; return the results. Raises ValueError if a request fails, ConnectionError
        if the engine disconnects.
        """
        self._waiting = iter(load.requests())
        self._seen = asyncio.get_running_loop().create_future()
        self._records = Records(load)
        for _ in range(load.concurrency):
            self._plan_next(self._records)
        return await self._seen

    def on_hello(self, hello: EngineHello) -> None:
        """See `EnginePortListener`."""

    def on_events(self, events: StepEvents) -> None:
        """See `EnginePortListener`."""
        records, seen = self._records, self._seen
        if records is None or seen is None:
            return
        for key in events.keys.tolist():
            records.tokens(key, 1)
        for end in events.ends:
            if not isinstance(end, Completed):
                self._fail(ValueError(f"a request failed: {end.reason.name}"))
                return
            records.end(end.key)
            self._plan_next(records)
        if records.is_complete:
            self._seen = None
            seen.set_result(records.summary())

    def on_detached(self, name: str, keys: tuple[int, ...]) -> None:
        """See `EnginePortListener`."""

    def on_lost(self) -> None:
        """See `EnginePortListener`."""
        self._fail(ConnectionError("the engine is gone"))

    def _plan_next(self, records: Records) -> None:
        request = next(self._waiting, None)
        if request is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(request.pause_s, self._submit, records, request)

    def _submit(self, records: Records, request: Request) -> None:
        self._next_key += 1
        key = self._next_key
        records.start(key)
        spec = RequestSpec(
            key=key,
            request_id=str(key),
            prompt_ids=np.array(request.prompt, dtype=np.int32),
            max_tokens=request.num_tokens,
            sampling=SamplingParams(temperature=0.0),
            arrival_s=time.monotonic(),
        )
        self.port.submit((spec,))

    def _fail(self, error: Exception) -> None:
        if self._seen is not None and not self._seen.done():
            self._seen.set_exception(error)


async def link(path: Path) -> None:
    """Run loads over the engine's socket."""
    load = SocketLoad(path)
    await load.port.start(load)
    await load.port.wait_up()
    await answer_loads(load.run)
    await load.port.close()


async def service(address: str) -> None:
    """Run loads over gRPC, all on one connection."""
    async with Client(address, retry=NO_RETRY) as client:

        async def run(load: Load) -> LoadSummary:
            async def generate(records: Records, key: int, request: Request) -> None:
                token_prompt = TokenPrompt(ids=tuple(request.prompt))
                records.start(key)
                async for event in client.generate(
                    token_prompt,
                    max_tokens=request.num_tokens,
                    ignore_eos=True,
                    temperature=0.0,
                ):
                    if isinstance(event, Tokens):
                        records.tokens(key, event.num_tokens)
                records.end(key)

            return await closed_loop(load, generate)

        await answer_loads(run)


def main(role: str, *places: str) -> None:
    """Run the process of `role` with its arguments."""
    match role, places:
        case "floor", (folder,):
            asyncio.run(floor(Path(folder)))
        case "engine", (folder, path):
            engine(Path(folder), Path(path))
        case "link", (path,):
            uvloop.run(link(Path(path)))
        case "service", (address,):
            asyncio.run(service(address))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=2)
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
