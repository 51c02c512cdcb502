"""Decoding of the engine's statistics in each known format."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.executor.trtllm.page_audit import PageAudit
from penstock.executor.trtllm.stats import EngineStats, StatsPoller, read_stats
from support.timeout import TEST_TIMEOUT_S


@pytest.mark.parametrize(
    "stats", [{}, {"kvCacheStats": None}, {"kvCacheStats": {"maxNumBlocks": 0}}]
)
def test_statistics_without_a_cache_report_nothing(stats: dict[str, Any]) -> None:
    assert read_stats(stats) is None


def iteration(free: int) -> dict[str, Any]:
    cache = {"maxNumBlocks": 10, "freeNumBlocks": free, "tokensPerBlock": 32}
    return {"kvCacheStats": cache, "maxNumActiveRequests": 7}


def test_statistics_are_read() -> None:
    stats = read_stats(iteration(4))

    assert stats == EngineStats(
        max_num_blocks=10, free_num_blocks=4, tokens_per_block=32, max_num_active=7
    )
    assert stats is not None
    assert stats.num_used_blocks == 6


def pushing_llm(opened: list[int], revived: list[int]) -> Any:
    """Return an engine whose statistics iterators end early: iterators with odd numbers after one
    iteration, the others at once.

    `opened` gets the number of each iterator that is opened, from 1 on. `revived` gets the number
    of the newest iterator at each call of `mark_undone`.
    """

    class Pushed:
        async def __aiter__(self) -> AsyncGenerator[Any]:
            opened.append(len(opened) + 1)
            if opened[-1] % 2:
                yield iteration(opened[-1])
            await asyncio.sleep(0)

        def mark_undone(self) -> None:
            revived.append(opened[-1])

    class Llm:
        def get_stats_async(self, timeout: float | None = 2) -> Any:
            assert timeout, "0 raises in the real queue"
            return Pushed()

    return Llm()


async def test_the_poller_revives_what_ended_while_requests_are_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.executor.trtllm.stats._INTERVAL_S", 0.0)
    opened: list[int] = []
    revived: list[int] = []
    noted = asyncio.Queue[int]()
    is_busy = True
    poller = StatsPoller(
        pushing_llm(opened, revived),
        lambda stats: noted.put_nowait(stats.free_num_blocks),
        lambda: is_busy,
    )
    task = asyncio.ensure_future(poller.run())
    poller.on_submit()
    # One submission, and the iterator ends after each iteration.
    assert [await asyncio.wait_for(noted.get(), TEST_TIMEOUT_S) for _ in range(3)] == [1, 3, 5]
    assert revived[:4] == [1, 2, 3, 4]
    is_busy = False
    for _ in range(50):
        await asyncio.sleep(0)
    num_opened = len(opened)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(opened) == num_opened, "an idle engine is not asked"
    task.cancel()


async def test_statistics_that_block_their_caller_are_fetched_on_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.executor.trtllm.stats._INTERVAL_S", 0.0)
    released = threading.Event()
    threads: set[str] = set()

    class Llm:
        _executor = SimpleNamespace(rpc_client=object())

        def get_stats(self, timeout: float | None = 2) -> list[Any]:
            threads.add(threading.current_thread().name)
            assert released.wait(TEST_TIMEOUT_S)
            return [iteration(3), json.dumps(iteration(4))]

    noted = asyncio.Queue[int]()
    llm: Any = Llm()
    poller = StatsPoller(llm, lambda stats: noted.put_nowait(stats.free_num_blocks), lambda: True)
    task = asyncio.ensure_future(poller.run())
    poller.on_submit()
    for _ in range(20):
        await asyncio.sleep(0)
    # The loop turned meanwhile.
    released.set()
    assert [await asyncio.wait_for(noted.get(), TEST_TIMEOUT_S) for _ in range(2)] == [3, 4]
    assert threads == {"trtllm statistics"}
    task.cancel()


def test_an_engine_that_reports_nothing_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    audit = PageAudit()
    for now_s in range(0, 100, 10):
        audit.expect_check(float(now_s), is_busy=True)
    assert audit.num_missed == 2
    assert caplog.text.count("reported no statistics") == 1

    for now_s in range(100, 200, 10):
        audit.check(0)
        audit.expect_check(float(now_s), is_busy=True)
    for now_s in range(200, 2000, 100):
        audit.expect_check(float(now_s), is_busy=False)
    assert audit.num_missed == 2
