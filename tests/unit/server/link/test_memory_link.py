"""The link in memory: the engine stepped by hand, fronts without an event loop."""

import asyncio

import numpy as np
import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Finished, StepEvents
from penstock.scheduler.executor import Executor, ExecutorDied
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.server.link.frames import EngineHello
from penstock.server.link.ports import EngineUnavailable
from support.memory_link import MemoryEngine, MemoryPort

KEY = 1 << 32 | 1


class Heard:
    def __init__(self) -> None:
        self.num_hellos = 0
        self.num_lost = 0
        self.tokens: list[int] = []
        self.ends: list[object] = []
        self.ended = asyncio.Event()

    def on_hello(self, hello: EngineHello) -> None:
        self.num_hellos += 1

    def on_events(self, events: StepEvents) -> None:
        self.tokens += events.tokens.tolist()
        self.ends += events.ends
        if events.ends:
            self.ended.set()

    def on_lost(self) -> None:
        self.num_lost += 1
        self.ended.set()


def make_engine(executor: Executor | None = None) -> MemoryEngine:
    executor = executor or create_executor(
        ExecutorConfig(kind=ExecutorKind.SIMULATED, num_blocks=64, max_seq_len=512)
    )
    now = [0.0]
    hello = EngineHello(
        epoch=1, model="m", executor=executor.info, max_num_waiting=4, max_num_waiting_tokens=400
    )
    clock = lambda: now[0]  # noqa: E731 - a clock that stands still
    return MemoryEngine(Engine(executor, SchedulerConfig(), clock), hello, clock)


def spec(max_tokens: int = 4, key: int = KEY) -> RequestSpec:
    prompt = np.arange(1, 9, dtype=np.int32)
    return RequestSpec(key=key, request_id=str(key), prompt_ids=prompt, max_tokens=max_tokens)


def connected(engine: MemoryEngine, front_id: int = 1) -> tuple[MemoryPort, Heard]:
    port, heard = engine.port(front_id), Heard()
    port.attach(heard)
    engine.pump(0)
    assert port.is_up
    return port, heard


def test_one_pump_is_one_step() -> None:
    engine = make_engine()
    port, heard = connected(engine)
    port.submit((spec(max_tokens=4),))
    assert engine.pump() == 1
    assert len(heard.tokens) == 1
    assert engine.pump(100) == 4, "three tokens, and a step that tells the executor of the release"
    assert len(heard.tokens) == 4
    assert [type(end) for end in heard.ends] == [Finished]
    assert engine.num_live == 0
    assert engine.pump(100) == 0


def test_a_submit_before_the_hello_is_refused() -> None:
    engine = make_engine()
    port = engine.port(1)
    port.attach(Heard())
    with pytest.raises(EngineUnavailable):
        port.submit((spec(),))


def test_a_killed_engine_says_nothing_more() -> None:
    engine = make_engine()
    port, heard = connected(engine)
    port.submit((spec(max_tokens=100),))
    engine.pump(3)
    engine.kill()
    engine.kill()
    assert heard.num_lost == 1
    assert not port.is_up
    assert engine.pump(5) == 0
    assert heard.ends == []
    with pytest.raises(EngineUnavailable):
        port.submit((spec(key=KEY + 1),))


def test_a_front_that_hangs_up_takes_only_its_requests_along() -> None:
    engine = make_engine()
    port_1, heard_1 = connected(engine, 1)
    port_2, heard_2 = connected(engine, 2)
    port_1.submit((spec(max_tokens=100),))
    port_2.submit((spec(max_tokens=10, key=2 << 32 | 1),))
    engine.pump()
    assert engine.num_live == 2
    asyncio.run(port_1.close())
    engine.pump(50)
    assert engine.num_live == 0
    assert len(heard_1.tokens) == 1
    assert len(heard_2.tokens) == 10


def test_cancel_reaches_the_engine() -> None:
    engine = make_engine()
    port, heard = connected(engine)
    port.submit((spec(max_tokens=100),))
    engine.pump(2)
    port.cancel((KEY,), FinishReason.STOP)
    engine.pump()
    (end,) = heard.ends
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP


async def test_a_thread_drives_it_and_the_loop_hears_it() -> None:
    engine = make_engine()
    port, heard = engine.port(1), Heard()
    await port.start(heard)
    engine.start_thread()
    await port.wait_up()
    port.submit((spec(max_tokens=30),))
    await heard.ended.wait()
    assert len(heard.tokens) == 30
    assert await port.cancel_by_id("nobody") is None
    engine.close()


async def test_what_the_engine_raises_on_its_thread_is_raised_by_close() -> None:
    class Dying:
        def __init__(self, inner: Executor) -> None:
            self.info = inner.info
            self.ready_fd = inner.ready_fd
            self.launch = inner.launch
            self.close = inner.close

        def collect(self) -> object:
            raise ExecutorDied("scripted")

    inner = create_executor(ExecutorConfig(kind=ExecutorKind.SIMULATED, num_blocks=64))
    engine = make_engine(Dying(inner))  # type: ignore[arg-type]  # collect never returns
    port, heard = engine.port(1), Heard()
    await port.start(heard)
    engine.start_thread()
    await port.wait_up()
    port.submit((spec(),))
    await heard.ended.wait()
    assert heard.num_lost == 1
    with pytest.raises(ExecutorDied):
        engine.close()
