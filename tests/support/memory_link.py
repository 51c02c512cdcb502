"""The link without sockets: engine and fronts in one process, stepped by the test.

Contains the transport: the engine reads a front's bytes at its next `pump`, the front reads the
engine's in the next iteration of its loop. All other parts are the real ones.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.scheduler.cache_index import CacheIndex
from penstock.scheduler.engine import Engine
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.kept_streams import DEFAULT_LIMITS, KeptLimits, KeptStreams
from penstock.server.link.connection import Connection, PersistentConnection
from penstock.server.link.frames import EngineHello, Frame, decode
from penstock.server.link.unix_port import UnixEnginePort
from penstock.server.link.wire import FrameBuffer


class MemoryEngine:
    """One engine and the fronts connected to it. `clock` is the engine's; see `Dispatcher`."""

    def __init__(
        self,
        engine: Engine,
        hello: EngineHello,
        clock: Callable[[], float] = time.monotonic,
        *,
        cache_index: CacheIndex | None = None,
        kept_limits: KeptLimits = DEFAULT_LIMITS,
    ) -> None:
        self._clock = clock
        self._dispatcher = Dispatcher(
            engine, hello, clock=clock, cache_index=cache_index, kept_limits=kept_limits
        )
        self._ports: dict[int, MemoryPort] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_alive = True

    @property
    def num_live(self) -> int:
        return self._dispatcher.num_live

    @property
    def kept(self) -> KeptStreams:
        return self._dispatcher.kept

    def port(self, front_id: int) -> "MemoryPort":
        """Return a port for a front with that id; it connects on `start`."""
        return MemoryPort(self, front_id)

    def pump(self, max_num_steps: int = 1) -> int:
        """Read the fronts' frames, do up to `max_num_steps`; return how many had work."""
        num_steps = 0
        self._drain_inbox()
        while num_steps < max_num_steps and self._has_work():
            for front_id, frame in self._dispatcher.step():
                self._deliver(front_id, frame)
            num_steps += 1
            self._drain_inbox()
        return num_steps

    def sweep(self) -> None:
        """Do what an engine does about once a second. Call it between pumps."""
        self._dispatcher.sweep()

    def close(self) -> None:
        """Stop as a crashed engine does: nothing more is sent, and every front detects the loss."""
        self._is_alive = False
        for port in self._ports.values():
            port.lose()
        self._ports.clear()

    def greet(self, port: "MemoryPort") -> None:
        """Connect a front at the next pump."""

        def greet() -> None:
            self._ports[port.front_id] = port
            port.connect()
            self._deliver(port.front_id, self._dispatcher.front_connected(port.front_id))

        self._inbox.append(greet)

    def hang_up(self, front_id: int) -> None:
        """Disconnect a front at the next pump."""

        def lose() -> None:
            port = self._ports.pop(front_id, None)
            if port is not None:
                self._dispatcher.front_gone(front_id)
                port.lose()

        self._inbox.append(lose)

    def take(self, front_id: int, data: bytes) -> None:
        """Receive bytes that a front wrote."""

        def handle() -> None:
            if front_id not in self._ports:
                return
            for body in FrameBuffer().feed(data):
                answer = self._dispatcher.handle(front_id, decode(body))
                if answer is not None:
                    self._deliver(front_id, answer)

        self._inbox.append(handle)

    def _deliver(self, front_id: int, frame: bytes) -> None:
        port = self._ports.get(front_id)
        if port is not None:
            port.deliver(frame)

    def _drain_inbox(self) -> None:
        while self._is_alive and self._inbox:
            self._inbox.popleft()()

    def _has_work(self) -> bool:
        engine = self._dispatcher.engine
        has_work = engine.has_work or self._dispatcher.has_own_work
        return self._is_alive and (has_work or self._clock() >= engine.next_wakeup_s())


class MemoryPort(UnixEnginePort):
    """An `EnginePort` to a `MemoryEngine`; use `MemoryEngine.port`."""

    def __init__(self, engine: MemoryEngine, front_id: int) -> None:
        super().__init__(Path(), front_id)
        self.front_id = front_id
        self._memory = _MemoryConnection(
            self, engine, partial(Connection, "the engine", decode, on_frame=self._on_frame)
        )
        self._link = self._memory

    def connect(self) -> None:
        """Handle the engine's acceptance of the connection."""
        asyncio.get_running_loop().call_soon(self._memory.connect)

    def deliver(self, frame: bytes) -> None:
        """Receive a frame that the engine wrote."""
        asyncio.get_running_loop().call_soon(self._memory.read, frame)

    def lose(self) -> None:
        self._up.clear()
        asyncio.get_running_loop().call_soon(self._memory.lose)

    def on_closed(self, connection: Connection[Frame]) -> None:
        """Handle the loss in the front."""
        self._on_closed(connection)

    def _write(self, frame: bytes) -> None:
        super()._write(frame)
        self._flush()


class _MemoryConnection(PersistentConnection[Frame]):
    """A connection that reopens when the engine greets again."""

    def __init__(
        self,
        port: MemoryPort,
        engine: MemoryEngine,
        connect: Callable[..., Connection[Frame]],
    ) -> None:
        super().__init__(
            Path(),
            connect,
            on_open=lambda _: None,
            on_closed=port.on_closed,
            pauses_s=(0.0, 0.0),
        )
        self._port = port
        self._engine = engine

    def start(self) -> None:
        self._engine.greet(self._port)

    async def close(self) -> None:
        self._engine.hang_up(self._port.front_id)

    def connect(self) -> None:
        self._new().connection_made(_Transport(partial(self._engine.take, self._port.front_id)))

    def read(self, data: bytes) -> None:
        if self.current is not None:
            self.current.data_received(data)

    def lose(self) -> None:
        if self.current is not None:
            self.current.connection_lost(None)


class _Transport(asyncio.Transport):
    """Forwards every write at once."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        super().__init__()
        self._take = take

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._take(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False
