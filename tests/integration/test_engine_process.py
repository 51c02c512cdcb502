"""The engine process as a real child of the test, which acts as its supervisor and its front."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.scheduler.events import Completed, StepEvents
from penstock.scheduler.request import RequestSpec
from penstock.server.config import EngineLaunch, ServerConfig, encode_launch
from penstock.server.ipc.frames import EngineHello
from penstock.server.ipc.unix_port import UnixEnginePort
from penstock.server.processes.child import Child, ChildFailed
from penstock.server.processes.exit_codes import (
    EXIT_CANNOT_START,
    EXIT_ENGINE_DIED,
    EXIT_OK,
    EXIT_ORPHANED,
)
from support.timeout import TEST_TIMEOUT_S

MODULE = "penstock.server.processes.engine_process"
SIMULATED = ExecutorConfig(kind=ExecutorKind.SIMULATED, num_blocks=1024, max_seq_len=8192)


class Received:
    def __init__(self) -> None:
        self.hello: asyncio.Future[EngineHello] = asyncio.get_running_loop().create_future()
        self.num_tokens = 0
        self.end: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()

    def on_hello(self, hello: EngineHello) -> None:
        self.hello.set_result(hello)

    def on_events(self, events: StepEvents) -> None:
        self.num_tokens += len(events.tokens)
        for end in events.ends:
            self.end.set_result(end)

    def on_detached(self, name: str, keys: tuple[int, ...]) -> None:
        """Do nothing: no other front takes over a stream."""

    def on_lost(self) -> None:
        self.lost.set()


@contextlib.asynccontextmanager
async def engine(path: Path, executor: ExecutorConfig) -> AsyncGenerator[Child]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = ServerConfig(model="m", model_path=Path("/nowhere"), executor=executor)
        launch = EngineLaunch(
            server=server, socket_path=path, listener_fd=listener.fileno(), epoch=7
        )
        child = await Child.spawn(
            "engine",
            MODULE,
            encode_launch(launch),
            environment={},
            inherited_fds=(listener.fileno(),),
        )
    try:
        yield child
    finally:
        child.kill()
        await asyncio.wait_for(child.ended(), TEST_TIMEOUT_S)


@contextlib.asynccontextmanager
async def front(path: Path) -> AsyncGenerator[tuple[UnixEnginePort, Received]]:
    port, received = UnixEnginePort(path, 1), Received()
    await port.start(received)
    try:
        yield port, received
    finally:
        await port.close()


def spec(max_tokens: int) -> RequestSpec:
    prompt = np.arange(1, 40, dtype=np.int32)
    return RequestSpec(key=1 << 32 | 1, request_id="r", prompt_ids=prompt, max_tokens=max_tokens)


async def test_the_engine_process_serves_a_front_and_exits_when_stopped(path: Path) -> None:
    async with engine(path, SIMULATED) as child, front(path) as (port, received):
        facts = await asyncio.wait_for(child.started(), TEST_TIMEOUT_S)
        assert facts["num_blocks"] == 1024
        greeting = await asyncio.wait_for(received.hello, TEST_TIMEOUT_S)
        assert (greeting.epoch, greeting.model) == (7, "m")
        assert greeting.executor.num_blocks == 1024
        port.submit((spec(max_tokens=33),))
        assert isinstance(await asyncio.wait_for(received.end, TEST_TIMEOUT_S), Completed)
        assert received.num_tokens == 33
        child.stop()
        assert await asyncio.wait_for(child.ended(), TEST_TIMEOUT_S) == EXIT_OK
        await asyncio.wait_for(received.lost.wait(), TEST_TIMEOUT_S)


async def test_the_death_of_the_executor_has_its_own_exit_code(path: Path) -> None:
    fault = Fault(kind=FaultKind.EXECUTOR_DIES, at_output=3)
    executor = dataclasses.replace(SIMULATED, simulated=SimulatedConfig(faults=(fault,)))
    async with engine(path, executor) as child, front(path) as (port, received):
        await asyncio.wait_for(port.wait_up(), TEST_TIMEOUT_S)
        port.submit((spec(max_tokens=1000),))
        await asyncio.wait_for(received.lost.wait(), TEST_TIMEOUT_S)
        assert await asyncio.wait_for(child.ended(), TEST_TIMEOUT_S) == EXIT_ENGINE_DIED
        assert not received.end.done()


async def test_the_engine_process_does_not_outlive_its_supervisor(path: Path) -> None:
    async with engine(path, SIMULATED) as child, front(path) as (port, received):
        await asyncio.wait_for(port.wait_up(), TEST_TIMEOUT_S)
        child.close_control()
        assert await asyncio.wait_for(child.ended(), TEST_TIMEOUT_S) == EXIT_ORPHANED
        await asyncio.wait_for(received.lost.wait(), TEST_TIMEOUT_S)
        assert not path.parent.exists()


async def test_the_engine_process_does_not_outlive_its_supervisor_during_a_hung_step(
    path: Path,
) -> None:
    fault = Fault(kind=FaultKind.HANG, at_output=2)
    executor = dataclasses.replace(SIMULATED, simulated=SimulatedConfig(faults=(fault,)))
    async with engine(path, executor) as child, front(path) as (port, _):
        await asyncio.wait_for(port.wait_up(), TEST_TIMEOUT_S)
        port.submit((spec(max_tokens=1000),))
        child.close_control()
        assert await asyncio.wait_for(child.ended(), TEST_TIMEOUT_S) == EXIT_ORPHANED


@pytest.mark.parametrize(
    ("executor", "reason"),
    [
        (ExecutorConfig(kind=ExecutorKind.TORCH, model_path=Path("/absent")), r"^[^\n]+$"),
        (dataclasses.replace(SIMULATED, num_blocks=10**15), r"^out of memory(: [^\n]*)?$"),
    ],
    ids=["no model", "too much for the scheduler"],
)
async def test_a_failed_start_is_reported_in_one_line(
    path: Path, executor: ExecutorConfig, reason: str
) -> None:
    async with engine(path, executor) as child:
        with pytest.raises(ChildFailed, match=reason):
            await asyncio.wait_for(child.started(), TEST_TIMEOUT_S)
        assert await asyncio.wait_for(child.ended(), TEST_TIMEOUT_S) == EXIT_CANNOT_START


async def test_a_death_before_it_is_ready_is_reported(path: Path) -> None:
    async with engine(path, SIMULATED) as child:
        child.kill()
        with pytest.raises(ChildFailed, match="killed by signal 9 before it was ready"):
            await asyncio.wait_for(child.started(), TEST_TIMEOUT_S)
