"""Calls of the engine run in the event loop's thread. Blocking calls, such as the engine's start,
run in a worker thread.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.executor.trtllm.loop_thread import LoopThread, in_worker
from support.timeout import TEST_TIMEOUT_S


def test_a_blocking_call_runs_outside_the_loop() -> None:
    thread = LoopThread("test loop")
    release = threading.Event()

    async def both() -> tuple[str, bool]:
        blocked = asyncio.ensure_future(in_worker(lambda: release.wait(TEST_TIMEOUT_S), "blocked"))
        await asyncio.sleep(0)
        release.set()
        return threading.current_thread().name, await blocked

    assert thread.run(both(), TEST_TIMEOUT_S) == ("test loop", True)
    thread.stop(TEST_TIMEOUT_S)
    thread.post(lambda: None)


def test_a_worker_passes_its_exception_on() -> None:
    thread = LoopThread("test loop")

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        thread.run(in_worker(fail, "failing"), TEST_TIMEOUT_S)
    thread.stop(TEST_TIMEOUT_S)


def test_waiting_for_the_loop_is_bounded() -> None:
    thread = LoopThread("test loop")
    with pytest.raises(TimeoutError):
        thread.run(asyncio.sleep(TEST_TIMEOUT_S), 0.01)
    thread.stop(TEST_TIMEOUT_S)
