"""Both ends of the Unix-socket link: an engine that runs on a thread or is stepped by the test, and
the ports of fronts.
"""

import asyncio
import contextlib
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import NO_TIME, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.engine.kept_streams import KeptLimits
from penstock.server.engine.loop import EngineLoop
from penstock.server.front.config import FrontConfig
from penstock.server.ipc.frames import EngineHello
from penstock.server.ipc.ports import EnginePortListener
from penstock.server.ipc.unix_port import UnixEnginePort
from support.timeout import TEST_TIMEOUT_S

INFO = ExecutorInfo(
    name="fake", vocab_size=100, block_size=4, num_blocks=8, max_seq_len=64, max_num_seqs=4
)
LIMITS = SchedulerConfig(max_num_waiting=8, max_num_waiting_tokens=800)
_FRONT = FrontConfig()
KEPT_LIMITS = KeptLimits(max_bytes=_FRONT.max_resume_bytes, max_unread=_FRONT.max_detached_requests)
"""The limits of kept streams of a service with default settings."""


def hello(
    epoch: int = 1,
    info: ExecutorInfo = INFO,
    limits: SchedulerConfig = LIMITS,
    *,
    publishes_cache: bool = False,
) -> EngineHello:
    return EngineHello(
        epoch=epoch,
        model="tiny",
        executor=info,
        max_num_waiting=limits.max_num_waiting,
        max_num_waiting_tokens=limits.max_num_waiting_tokens,
        publishes_cache=publishes_cache,
    )


def spec(front_id: int, counter: int, max_tokens: int = 5, request_id: str = "") -> RequestSpec:
    return RequestSpec(
        key=front_id << 32 | counter,
        request_id=request_id or f"{front_id}-{counter}",
        prompt_ids=np.arange(1, 7, dtype=np.int32),
        max_tokens=max_tokens,
    )


def simulated_engine() -> Engine:
    executor = create_executor(
        ExecutorConfig(kind=ExecutorKind.SIMULATED, num_blocks=4096, max_seq_len=65536)
    )
    return Engine(executor, SchedulerConfig(), time.monotonic)


class FakeEngine(Engine):
    """An engine that does not schedule: it records requests and cancels, and each step returns the
    next events that the test has put into `updates`. `all_taken` is set when a step has taken the
    last of them.
    """

    def __init__(self) -> None:
        self.submitted: queue.Queue[tuple[RequestSpec, ...]] = queue.Queue()
        self.cancelled: queue.Queue[int] = queue.Queue()
        self.updates: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
        self.all_taken = threading.Event()

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        self.submitted.put(specs)

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        self.cancelled.put(key)
        return True

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        return None

    def step(self) -> StepEvents:
        updates = self.updates.get_nowait()
        if self.updates.empty():
            self.all_taken.set()
        return updates

    @property
    def has_work(self) -> bool:
        return not self.updates.empty()

    @property
    def ready_fd(self) -> int | None:
        return None

    def next_wakeup_s(self) -> float:
        return NO_TIME

    def check_next_piece(self) -> bool:
        return True


class EngineLink:
    """The engine's end of its connections, as in an engine process: the listening socket, the
    connections of fronts and the dispatcher. It runs when `pump` is called or, after `run`, on
    `thread`.

    `clock`: the engine's clock. `limits`: other arguments of FrontConnections; by default a clock
    that stands still, so that no front exceeds a time limit. `settings`: other arguments of
    Dispatcher.
    """

    thread: threading.Thread

    def __init__(
        self,
        engine: Engine,
        hello: EngineHello,
        clock: Callable[[], float] = time.monotonic,
        *,
        listener: socket.socket | None = None,
        limits: dict[str, Any] | None = None,
        kept_limits: KeptLimits = KEPT_LIMITS,
        **settings: Any,
    ) -> None:
        self.dispatcher = Dispatcher(
            engine, hello, clock=clock, kept_limits=kept_limits, **settings
        )
        self._clock = clock
        self._stack = contextlib.ExitStack()
        if listener is None:
            self._path = self._stack.enter_context(socket_path())
            listener = self._stack.enter_context(listening(self._path))
        # With this clock no front exceeds a time limit.
        limits = {"clock": lambda: 0.0} if limits is None else limits
        self.connections = FrontConnections(listener, self.dispatcher, **limits)
        self._stack.callback(self.connections.close)
        self._is_pumped = True

    def port(self, front_id: int) -> UnixEnginePort:
        return UnixEnginePort(self._path, front_id)

    async def connect(self, port: UnixEnginePort, listener: EnginePortListener) -> None:
        await port.start(listener)
        await self.until_up(port)

    async def until_up(self, port: UnixEnginePort) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while not port.is_up:
                self.pump(0)
                await asyncio.sleep(0)

    def pump(self, max_num_steps: int = 1) -> int:
        """Read the fronts' frames, run up to `max_num_steps` steps while there is work, and send
        the frames of these steps; return the number of steps. Returns 0 at once after `run` or
        `close`.
        """
        if not self._is_pumped:
            return 0
        num_steps = 0
        self.connections.poll(0.0)
        while num_steps < max_num_steps and self._has_work():
            for front_id, frame in self.dispatcher.step():
                self.connections.send(front_id, frame)
            num_steps += 1
            self.connections.poll(0.0)
        return num_steps

    def run(self) -> None:
        """Run on a thread until `close`."""
        self._is_pumped = False
        loop = EngineLoop(self.connections, self._clock)
        self.thread = threading.Thread(target=loop.run)
        self.thread.start()
        self._stack.callback(self._stop, loop)

    def close(self) -> None:
        """Stop as a crashed engine does: nothing more is sent, and every front detects the loss."""
        self._is_pumped = False
        self._stack.close()

    def _stop(self, loop: EngineLoop) -> None:
        loop.stop()
        self.thread.join(TEST_TIMEOUT_S)
        assert not self.thread.is_alive()

    def _has_work(self) -> bool:
        engine = self.dispatcher.engine
        has_work = engine.has_work or self.dispatcher.has_pending_work
        return has_work or self._clock() >= engine.next_wakeup_s()


class Recorder:
    """A listener that keeps what it receives."""

    def __init__(self) -> None:
        self.hellos: asyncio.Queue[EngineHello] = asyncio.Queue()
        self.events: asyncio.Queue[StepEvents] = asyncio.Queue()
        self.lost: asyncio.Queue[None] = asyncio.Queue()
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Completed] = {}

    def on_hello(self, hello: EngineHello) -> None:
        self.hellos.put_nowait(hello)

    def on_events(self, events: StepEvents) -> None:
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            self.tokens.setdefault(key, []).append(token)
        for end in events.ends:
            assert isinstance(end, Completed)
            self.ended[end.key] = end
        self.events.put_nowait(events)

    def on_detached(self, name: str, keys: tuple[int, ...]) -> None:
        """Do nothing: no other front takes over a stream."""

    def on_lost(self) -> None:
        self.lost.put_nowait(None)

    async def until_ended(self, key: int) -> Completed:
        while key not in self.ended:
            await asyncio.wait_for(self.events.get(), TEST_TIMEOUT_S)
        return self.ended[key]

    async def until_token(self, key: int) -> None:
        while key not in self.tokens:
            await asyncio.wait_for(self.events.get(), TEST_TIMEOUT_S)


@contextlib.contextmanager
def socket_path() -> Generator[Path]:
    """Provide a socket path in a new folder; paths in pytest's folders may exceed the limit."""
    folder = Path(tempfile.mkdtemp(prefix="pl-"))
    try:
        yield folder / "engine.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def listening(path: Path) -> Generator[socket.socket]:
    """Provide a listening socket, as the supervisor passes it to every engine."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen(16)
        yield made


@contextlib.asynccontextmanager
async def front(path: Path, front_id: int) -> AsyncGenerator[tuple[UnixEnginePort, Recorder]]:
    port, recorder = UnixEnginePort(path, front_id), Recorder()
    await port.start(recorder)
    await asyncio.wait_for(port.wait_up(), TEST_TIMEOUT_S)
    try:
        yield port, recorder
    finally:
        await port.close()
