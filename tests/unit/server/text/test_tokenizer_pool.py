"""Tenants take turns on the tokenizer's threads. The text that waits is limited per tenant."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.server.text.errors import TooMuchText
from penstock.server.text.tokenizer_pool import Steps, TokenizerPool, in_one_step
from support.timeout import TEST_TIMEOUT_S

LARGE = 1 << 20


@pytest.fixture
def pool() -> Iterator[TokenizerPool]:
    pool = TokenizerPool(1, max_bytes_per_tenant=10_000)
    yield pool
    pool.close()


class Blocked:
    """A step that blocks its thread until it is released."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.proceed = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.proceed.wait(TEST_TIMEOUT_S)


def noted(order: list[str], name: str, num_steps: int, num_bytes: int = 5000) -> Steps[str]:
    for _ in range(num_steps):
        yield num_bytes
        order.append(name)
    return name


async def blocked(pool: TokenizerPool, num_bytes: int = 1) -> tuple[Blocked, asyncio.Task[None]]:
    step = Blocked()
    task = asyncio.create_task(
        pool.run(in_one_step(step, num_bytes), tenant="blocker", num_bytes=num_bytes)
    )
    await step.entered.wait()
    return step, task


async def test_another_tenants_steps_come_between_those_of_a_long_text(
    pool: TokenizerPool,
) -> None:
    step, blocker = await blocked(pool)
    order: list[str] = []
    hog = [
        asyncio.create_task(pool.run(noted(order, "hog", 4), tenant="hog", num_bytes=4000))
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    meek = asyncio.create_task(pool.run(noted(order, "meek", 1), tenant="meek", num_bytes=5000))
    await asyncio.sleep(0)
    step.proceed.set()
    assert await meek == "meek"
    assert order.index("meek") <= 1, "not behind what the other has waiting"
    assert await asyncio.gather(*hog) == ["hog", "hog"]
    await blocker


async def test_two_tenants_get_as_many_bytes(pool: TokenizerPool) -> None:
    step, blocker = await blocked(pool)
    order: list[str] = []
    runs = [
        asyncio.create_task(
            pool.run(noted(order, name, num, size), tenant=name, num_bytes=num * size)
        )
        for name, num, size in (("small", 12, 4000), ("big", 3, 19_072))
    ]
    await asyncio.sleep(0)
    step.proceed.set()
    await asyncio.gather(*runs, blocker)
    # 12 * (4000 + 1024) are 3 * (19072 + 1024).
    assert "".join(name[0] for name in order).count("ssssss") == 0


async def test_a_tenant_has_an_allowance_and_then_a_retry_time(
    pool: TokenizerPool,
) -> None:
    step, blocker = await blocked(pool)
    waiting = asyncio.create_task(
        pool.run(in_one_step(lambda: 1, 6000), tenant="a", num_bytes=6000)
    )
    await asyncio.sleep(0)
    with pytest.raises(TooMuchText) as caught:
        await pool.run(in_one_step(lambda: 2, 6000), tenant="a", num_bytes=6000)
    assert caught.value.max_bytes == 10_000
    assert caught.value.retry_after_s > 0
    replay = asyncio.create_task(
        pool.run(in_one_step(lambda: 3, 6000), tenant="a", num_bytes=6000, is_bounded=False)
    )
    other = asyncio.create_task(
        pool.run(in_one_step(lambda: 4, LARGE), tenant="b", num_bytes=LARGE)
    )
    await asyncio.sleep(0)
    step.proceed.set()
    assert [await task for task in (waiting, replay, other)] == [1, 3, 4], "one is always taken"
    await blocker
    # So much is accepted only from a tenant that has nothing here.
    for tenant in ("a", "b"):
        assert await pool.run(in_one_step(lambda: 5, LARGE), tenant=tenant, num_bytes=LARGE) == 5


async def test_a_cancelled_waiter_is_removed_from_the_queue(pool: TokenizerPool) -> None:
    step, blocker = await blocked(pool)
    order: list[str] = []
    gone = asyncio.create_task(pool.run(noted(order, "gone", 3), tenant="a", num_bytes=9000))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    last = pool.run(noted(order, "last", 1), tenant="a", num_bytes=9000)
    step.proceed.set()
    assert await last == "last"
    assert order == ["last"]
    await blocker


async def test_a_large_step_leaves_a_thread_to_small_ones() -> None:
    pool = TokenizerPool(2, max_bytes_per_tenant=LARGE)
    try:
        step, blocker = await blocked(pool, LARGE)
        second = asyncio.create_task(
            pool.run(in_one_step(lambda: "second", LARGE), tenant="b", num_bytes=LARGE)
        )
        await asyncio.sleep(0)
        assert await pool.run(in_one_step(lambda: "small", 10), tenant="c", num_bytes=10) == "small"
        assert not second.done()
        step.proceed.set()
        assert await second == "second"
        await blocker
    finally:
        pool.close()


async def test_an_exception_of_a_step_is_raised(pool: TokenizerPool) -> None:
    def fail() -> Any:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await pool.run(in_one_step(fail, 5), num_bytes=5)
    assert await pool.run(in_one_step(lambda: 7, 5), num_bytes=5) == 7


async def test_nothing_waits_for_threads_that_have_ended(pool: TokenizerPool) -> None:
    step, blocker = await blocked(pool)
    waiting = asyncio.create_task(pool.run(in_one_step(lambda: 1, 5), num_bytes=5))
    await asyncio.sleep(0)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    step.proceed.set()
    await blocker


async def test_only_large_texts_run_at_a_lower_thread_priority(pool: TokenizerPool) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    small, large = [
        await pool.run(in_one_step(priority, size), tenant="a", num_bytes=size)
        for size in (10, LARGE)
    ]
    assert small == priority() < large
