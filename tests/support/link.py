"""Both ends of the Unix-socket link: an engine on a thread, fronts by asyncio or controlled by
hand.
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

import numpy as np

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Finished, StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.request import NO_TIME, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.engine.loop import EngineLoop
from penstock.server.link.frames import EngineHello, FrontHello, encode
from penstock.server.link.unix_port import UnixEnginePort

INFO = ExecutorInfo(
    name="fake", vocab_size=100, block_size=4, num_blocks=8, max_seq_len=64, max_num_seqs=4
)
PATIENCE_S = 60.0


def hello(epoch: int = 1, info: ExecutorInfo = INFO) -> EngineHello:
    return EngineHello(
        epoch=epoch, model="m", executor=info, max_num_waiting=8, max_num_waiting_tokens=800
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
    """Records what it receives, and returns what the test puts into `news`. Not a real engine."""

    def __init__(self) -> None:
        self.submitted: queue.Queue[tuple[RequestSpec, ...]] = queue.Queue()
        self.cancelled: queue.Queue[int] = queue.Queue()
        self.news: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
        self.told_all = threading.Event()

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        self.submitted.put(specs)

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        self.cancelled.put(key)
        return True

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        return None

    def step(self) -> StepEvents:
        news = self.news.get_nowait()
        if self.news.empty():
            self.told_all.set()
        return news

    @property
    def has_work(self) -> bool:
        return not self.news.empty()

    @property
    def ready_fd(self) -> int | None:
        return None

    def next_wakeup_s(self) -> float:
        return NO_TIME

    def check_next_piece(self) -> bool:
        return True

    def look(self) -> tuple[LiveView, ...]:
        return ()


class EngineThread:
    """An engine behind a listening socket, as the engine process runs it."""

    def __init__(
        self,
        listener: socket.socket,
        engine: Engine,
        epoch: int = 1,
        max_output_bytes: int = 1 << 20,
        max_blocked_s: float = 1000.0,
        clock: Callable[[], float] = time.monotonic,
        greeting: EngineHello | None = None,
    ) -> None:
        self.dispatcher = Dispatcher(engine, greeting or hello(epoch))
        self.hub = FrontConnections(
            listener,
            self.dispatcher,
            max_output_bytes=max_output_bytes,
            max_blocked_s=max_blocked_s,
            clock=clock,
        )
        self._loop = EngineLoop(self.hub, time.monotonic)
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        if not self.is_alive:
            return
        self._loop.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.hub.close()


class Recorder:
    """A listener that keeps what it receives."""

    def __init__(self) -> None:
        self.hellos: asyncio.Queue[EngineHello] = asyncio.Queue()
        self.events: asyncio.Queue[StepEvents] = asyncio.Queue()
        self.lost: asyncio.Queue[None] = asyncio.Queue()
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Finished] = {}

    def on_hello(self, hello: EngineHello) -> None:
        self.hellos.put_nowait(hello)

    def on_events(self, events: StepEvents) -> None:
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            self.tokens.setdefault(key, []).append(token)
        for end in events.ends:
            assert isinstance(end, Finished)
            self.ended[end.key] = end
        self.events.put_nowait(events)

    def on_lost(self) -> None:
        self.lost.put_nowait(None)

    async def until_ended(self, key: int) -> Finished:
        while key not in self.ended:
            await asyncio.wait_for(self.events.get(), PATIENCE_S)
        return self.ended[key]

    async def until_token(self, key: int) -> None:
        while key not in self.tokens:
            await asyncio.wait_for(self.events.get(), PATIENCE_S)


@contextlib.contextmanager
def socket_path() -> Generator[Path]:
    """Return a short socket path; pytest's own folders are too long."""
    folder = Path(tempfile.mkdtemp(prefix="pl-"))
    try:
        yield folder / "engine.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def listening(path: Path) -> Generator[socket.socket]:
    """Return a listening socket, as the supervisor hands it to every engine."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen(16)
        yield made


@contextlib.asynccontextmanager
async def front(path: Path, front_id: int) -> AsyncGenerator[tuple[UnixEnginePort, Recorder]]:
    port, recorder = UnixEnginePort(path, front_id), Recorder()
    await port.start(recorder)
    await asyncio.wait_for(port.wait_up(), PATIENCE_S)
    try:
        yield port, recorder
    finally:
        await port.close()


def raw_front(path: Path, front_id: int) -> socket.socket:
    """Connect a front by hand, with the handshake done; it reads only when the test does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    connection.connect(str(path))
    connection.sendall(encode(FrontHello(front_id=front_id)))
    assert connection.recv(65536)
    return connection


def read_until_eof(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 20):
            pass


def flood(fake: FakeEngine, engine: EngineThread, num_bytes: int) -> None:
    num_tokens = 4096
    for step in range(num_bytes // (12 * num_tokens) + 1):
        keys = np.full(num_tokens, 1 << 32 | 5, dtype=np.int64)
        tokens = np.zeros(num_tokens, dtype=np.int32)
        fake.news.put(StepEvents(step=step, at_s=0.0, keys=keys, tokens=tokens))
    engine.hub.wake()
