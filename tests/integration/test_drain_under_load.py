import asyncio
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from penstock.client import Client, Event, PenstockError, PoolConfig, SyncClient
from support.service import simulated, started
from support.timeout import TEST_TIMEOUT_S

NUM_TASKS = 32
NUM_THREADS = 8
PROMPT = [5, 6, 7]
POOL = PoolConfig(num_channels=2)


class Load:
    """Clients that send requests until stopped. `ends`: number of requests by how they ended, "ok"
    or the error's text.
    """

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self._has_updates = threading.Condition()
        self._is_over = threading.Event()

    def stop(self) -> None:
        self._is_over.set()

    def wait_for_more(self, num_more: int) -> None:
        with self._has_updates:
            target = self.ends["ok"] + num_more
            assert self._has_updates.wait_for(lambda: self.ends["ok"] >= target, TEST_TIMEOUT_S)

    async def run(self, client: Client) -> None:
        while not self._is_over.is_set():
            try:
                self._note([event async for event in self._events(client)])
            except PenstockError as error:
                self._note(error)

    def run_blocking(self, client: SyncClient) -> None:
        while not self._is_over.is_set():
            try:
                self._note(list(self._blocking_events(client)))
            except PenstockError as error:
                self._note(error)

    def _events(self, client: Client) -> AsyncIterator[Event]:
        return client.generate(PROMPT, max_tokens=10, ignore_eos=True, deadline_s=TEST_TIMEOUT_S)

    def _blocking_events(self, client: SyncClient) -> Iterator[Event]:
        return client.generate(PROMPT, max_tokens=10, ignore_eos=True, deadline_s=TEST_TIMEOUT_S)

    def _note(self, end: list[Event] | PenstockError) -> None:
        with self._has_updates:
            self.ends[str(end) if isinstance(end, PenstockError) else "ok"] += 1
            self._has_updates.notify_all()


async def test_no_request_fails_when_one_of_two_services_drains() -> None:
    load = Load()
    loop = asyncio.get_running_loop()
    # A thread for each blocking client, and one in which the test waits.
    threads = ThreadPoolExecutor(2 * NUM_THREADS + 1)
    callers: list[asyncio.Future[None]] = []
    async with (
        started(*simulated()) as stays,
        started(*simulated()) as goes,
        AsyncExitStack() as up,
    ):
        addresses = [stays.address, goes.address]
        for is_multiplexed in (False, True):
            client = Client(addresses, multiplex=is_multiplexed, pool=POOL)
            blocking = SyncClient(addresses, multiplex=is_multiplexed, pool=POOL)
            up.enter_context(blocking)
            await up.enter_async_context(client)
            callers += [asyncio.ensure_future(load.run(client)) for _ in range(NUM_TASKS)]
            callers += [
                loop.run_in_executor(threads, load.run_blocking, blocking)
                for _ in range(NUM_THREADS)
            ]
        up.callback(load.stop)
        await loop.run_in_executor(threads, load.wait_for_more, 200)

        goes.signal(signal.SIGTERM)
        assert await goes.ended() == 0
        await loop.run_in_executor(threads, load.wait_for_more, 200)
        load.stop()
        await asyncio.gather(*callers)

    assert set(load.ends) == {"ok"}, load.ends
