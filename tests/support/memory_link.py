"""The link without sockets: engine and fronts in one process.

Owns the queue between them. Frames are encoded and decoded exactly as on the socket, so whatever
passes here passes there. The engine runs either by `pump`, step by step on the caller's thread, or
on a separate thread.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from penstock.scheduler.cache_book import CacheBook
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.kept_streams import DEFAULT_LIMITS, KeptLimits, KeptStreams
from penstock.server.link.cache_feeds import CacheSubscriber
from penstock.server.link.frames import (
    Attached,
    CacheUpdate,
    CancelAnswer,
    CancelById,
    Detach,
    EngineHello,
    KeptRequest,
    Submit,
    cancel_frame,
    decode,
    encode,
)
from penstock.server.link.ports import (
    AttachCalls,
    AttachListener,
    CacheListener,
    DetachListener,
    EnginePortListener,
    EngineUnavailable,
)
from penstock.server.link.wire import FrameBuffer

_MAX_WAIT_S = 60.0


class MemoryEngine:
    """One engine and the fronts connected to it.

    `clock` is the engine's, used to wait for `next_wakeup_s` when a thread drives it. All else: see
    `Dispatcher`.
    """

    def __init__(
        self,
        engine: Engine,
        hello: EngineHello,
        clock: Callable[[], float] = time.monotonic,
        *,
        cache_book: CacheBook | None = None,
        kept_limits: KeptLimits = DEFAULT_LIMITS,
    ) -> None:
        self._clock = clock
        self._dispatcher = Dispatcher(
            engine,
            hello,
            clock=clock,
            cache_book=cache_book,
            kept_limits=kept_limits,
        )
        self._ports: dict[int, MemoryPort] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._is_alive = True
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        """False once the engine was killed or raised."""
        return self._is_alive

    @property
    def num_live(self) -> int:
        """Requests of all fronts that have not ended."""
        return self._dispatcher.num_live

    def port(self, front_id: int) -> "MemoryPort":
        """A port for a front with that id; it connects on `start` or `attach`."""
        return MemoryPort(self, front_id)

    def pump(self, max_num_steps: int = 1) -> int:
        """Take the fronts' frames, do up to that many steps; returns how many had work."""
        num_steps = 0
        self._drain_inbox()
        while num_steps < max_num_steps and self._has_work():
            self._step()
            num_steps += 1
            self._drain_inbox()
        return num_steps

    @property
    def kept(self) -> KeptStreams:
        """The streams that the engine keeps."""
        return self._dispatcher.kept

    def sweep(self) -> None:
        """Do what an engine does about once a second. Call it between pumps."""
        self._dispatcher.sweep()

    def start_thread(self) -> None:
        """Drive the engine by a thread until `close`.

        Raises ValueError for a self-paced executor: it takes an EngineLoop to wait for its news.
        """
        if self._dispatcher.engine.ready_fd is not None:
            raise ValueError("an engine over a self-paced executor needs an EngineLoop")
        self._thread = threading.Thread(target=self._run, name="memory engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; fronts receive `on_lost`. Raises what the engine raised on its thread, if it
        did."""
        with self._news:
            self._is_stopping = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.kill()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def kill(self) -> None:
        """Die as a crashed engine does: nothing more is stated, every front receives `on_lost`."""
        if self._is_alive:
            self._is_alive = False
            for port in list(self._ports.values()):
                port.lose()
            self._ports.clear()

    def greet(self, port: "MemoryPort") -> None:
        """A front is there; its hello follows at the next pump, or at once by the thread."""
        self._post(lambda: self._greet(port))

    def hang_up(self, front_id: int) -> None:
        """The front is gone, from the engine's view; its requests are cancelled."""
        self._post(lambda: self._forget(front_id))

    def take(self, front_id: int, frame: bytes) -> None:
        """A frame from a front, from any thread."""
        self._post(lambda: self._handle(front_id, frame))

    def _post(self, action: Callable[[], None]) -> None:
        with self._news:
            self._inbox.append(action)
            self._news.notify()

    def _greet(self, port: "MemoryPort") -> None:
        self._ports[port.front_id] = port
        port.deliver(self._dispatcher.front_connected(port.front_id))

    def _forget(self, front_id: int) -> None:
        port = self._ports.pop(front_id, None)
        if port is not None:
            self._dispatcher.front_gone(front_id)
            port.lose()

    def _handle(self, front_id: int, frame: bytes) -> None:
        port = self._ports.get(front_id)
        if port is None:
            return
        for body in FrameBuffer().feed(frame):
            answer = self._dispatcher.handle(front_id, decode(body))
            if answer is not None:
                port.deliver(answer)

    def _drain_inbox(self) -> None:
        while self._is_alive:
            try:
                action = self._inbox.popleft()
            except IndexError:
                return
            action()

    def _has_work(self) -> bool:
        engine = self._dispatcher.engine
        has_work = engine.has_work or self._dispatcher.has_own_work
        return self._is_alive and (has_work or self._clock() >= engine.next_wakeup_s())

    def _step(self) -> None:
        for front_id, frame in self._dispatcher.step():
            port = self._ports.get(front_id)
            if port is not None:
                port.deliver(frame)

    def _run(self) -> None:
        try:
            while not self._is_stopping and self._is_alive:
                if not self.pump(max_num_steps=1):
                    self._wait()
        except BaseException as failure:
            self._failure = failure
            self.kill()

    def _wait(self) -> None:
        until_wakeup_s = self._dispatcher.engine.next_wakeup_s() - self._clock()
        with self._news:
            if not self._inbox and not self._is_stopping:
                self._news.wait(min(_MAX_WAIT_S, max(0.0, until_wakeup_s)))


class MemoryPort:
    """An `EnginePort` to a `MemoryEngine`; use `MemoryEngine.port`.

    With a running event loop at `start` or `attach`, everything the listener receives it receives
    on that loop; otherwise on the thread that pumps.
    """

    def __init__(self, engine: MemoryEngine, front_id: int) -> None:
        self.front_id = front_id
        self._engine = engine
        self._listener: EnginePortListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = False
        self._up = asyncio.Event()
        self._answers: dict[int, asyncio.Future[RequestState | None]] = {}
        self._next_ticket = 0
        self._attaching = AttachCalls(lambda frame: self._write(encode(frame)))
        self._cache = CacheSubscriber(lambda frame: self._write(encode(frame)))

    def attach(self, listener: EnginePortListener) -> None:
        """Connect, without asyncio if none runs."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._listener = listener
        self._engine.greet(self)

    async def start(self, listener: EnginePortListener) -> None:
        """Connect; the hello comes later."""
        self.attach(listener)

    async def wait_up(self) -> None:
        """Return when the engine has stated hello."""
        await self._up.wait()

    @property
    def is_up(self) -> bool:
        """True between the engine's hello and its loss."""
        return self._is_up and self._engine.is_alive

    @property
    def num_unsent_bytes(self) -> int:
        """Nothing waits on this side."""
        return 0

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `EnginePort.submit`."""
        self._write(encode(Submit(specs=specs)))

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        """See `EnginePort.cancel`."""
        if self.is_up and keys:
            self._write(cancel_frame(keys, reason))

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        """See `EnginePort.cancel_by_id`."""
        ticket = self._next_ticket
        self._next_ticket += 1
        answer: asyncio.Future[RequestState | None] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        try:
            self._write(encode(CancelById(ticket=ticket, request_id=request_id)))
            return await answer
        finally:
            self._answers.pop(ticket, None)

    def submit_kept(self, specs: tuple[RequestSpec, ...], kept: KeptRequest) -> None:
        """See `EnginePort.submit_kept`."""
        self._write(encode(Submit(specs=specs, kept=kept)))

    async def attach_stream(self, name: str, on_attached: AttachListener) -> None:
        """See `EnginePort.attach_stream`."""
        await self._attaching.attach(name, on_attached)

    def detach(self, names: tuple[str, ...]) -> None:
        """See `EnginePort.detach`."""
        if self.is_up:
            self._write(encode(Detach(names=names)))

    def on_detached(self, listener: DetachListener) -> None:
        """See `EnginePort.on_detached`."""
        self._attaching.on_detached(listener)

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """See `EnginePort.follow_cache`."""
        return self._cache.follow(salt, listener)

    async def close(self) -> None:
        """Hang up: what this front still has is cancelled."""
        self._engine.hang_up(self.front_id)

    def deliver(self, frame: bytes) -> None:
        """A frame from the engine, on the engine's thread."""
        self._call(lambda: self._read(frame))

    def lose(self) -> None:
        """The engine is gone, stated on the engine's thread."""
        self._call(self._lost)

    def _call(self, action: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            action()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(action)

    def _write(self, frame: bytes) -> None:
        if not self.is_up:
            raise EngineUnavailable("the engine is down")
        self._engine.take(self.front_id, frame)

    def _read(self, frame: bytes) -> None:
        assert self._listener is not None
        for body in FrameBuffer().feed(frame):
            match decode(body):
                case EngineHello() as hello:
                    self._is_up = True
                    self._up.set()
                    self._listener.on_hello(hello)
                    self._cache.on_hello(hello)
                case StepEvents() as events:
                    self._listener.on_events(events)
                case CancelAnswer(ticket=ticket, state=state):
                    answer = self._answers.get(ticket)
                    if answer is not None and not answer.done():
                        answer.set_result(state)
                case Attached() | Detach() as word:
                    self._attaching.on_frame(word)
                case CacheUpdate() as news:
                    self._cache.on_update(news)
                case other:
                    raise AssertionError(f"an engine does not send {type(other).__name__}")

    def _lost(self) -> None:
        self._attaching.on_lost()
        self._cache.on_lost()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine was lost"))
        if self._is_up and self._listener is not None:
            self._is_up = False
            self._up.clear()
            self._listener.on_lost()
