"""How the stand-in's engine dies, and what callers see of it: hardly anything."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from support.fake_trtllm import FakeEngines
from support.fake_trtllm import fake_engines as fake_engines  # fixtures
from support.fake_trtllm import fake_trtllm as fake_trtllm

BUSY: dict[str, Any] = {"ignore_eos": True, "max_tokens": 200}


async def turn_loop() -> None:
    """Let everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_when_the_loop_dies_nobody_hears_of_it(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build()
    control = fake_engines.control
    result = llm.generate_async([5], fake_engines.params(**BUSY), streaming=True)
    control.step(2)
    await anext(result)
    await anext(result)
    reader = asyncio.ensure_future(anext(result))

    control.kill_loop()
    while control.view().is_alive:
        await turn_loop()
    result.abort()
    await turn_loop()

    assert not reader.done()
    assert llm._check_health(), "the flag is set in the worker alone"
    reader.cancel()


async def test_after_death_the_next_submission_shuts_down_and_raises(
    fake_engines: FakeEngines,
) -> None:
    from tensorrt_llm.llmapi import RequestError

    llm = fake_engines.build()
    control = fake_engines.control
    control.kill_loop()
    while control.view().is_alive:
        await turn_loop()

    with pytest.raises(RuntimeError, match="dead") as caught:
        llm.generate_async([5], fake_engines.params())
    assert not isinstance(caught.value, RequestError)
    assert control.shutdown_threads == (threading.current_thread().name,)
    assert not llm._check_health()
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async([5], fake_engines.params())


async def test_health_can_be_made_to_see_it(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(settings={"is_death_seen_by_health": True, "kill_loop_token": 9})
    control = fake_engines.control
    assert llm._check_health()

    llm.generate_async([9], fake_engines.params())
    control.resume()
    while control.view().is_alive:
        await turn_loop()

    assert not llm._check_health()


async def test_a_fatal_error_shuts_down_inside_the_consumers_coroutine(
    fake_engines: FakeEngines,
) -> None:
    """The loop stands still meanwhile: a shutdown that blocks blocks everyone on it."""
    from tensorrt_llm.llmapi import RequestError

    llm = fake_engines.build(settings={"shutdown_s": 30.0})
    control = fake_engines.control
    results = [
        llm.generate_async([5 + i], fake_engines.params(**BUSY), streaming=True) for i in range(2)
    ]
    control.step()
    for result in results:
        await anext(result)
    control.fail_fatally()
    while control.view().is_alive:
        await turn_loop()
    others: list[bool] = []
    asyncio.get_running_loop().call_soon(lambda: others.append(bool(control.shutdown_threads)))
    opener = threading.Timer(0.05, control.release)
    opener.start()

    with pytest.raises(RuntimeError, match="executor failed") as caught:
        await anext(results[0])

    assert not isinstance(caught.value, RequestError)
    assert control.shutdown_threads == (threading.current_thread().name,)
    assert not llm._check_health()
    assert not results[0].finished
    with pytest.raises(RuntimeError, match="executor failed"):
        await anext(results[1])
    assert len(control.shutdown_threads) == 1
    opener.join()


async def test_a_step_that_fails_fails_everyone_in_it(fake_engines: FakeEngines) -> None:
    from tensorrt_llm.llmapi import RequestError

    llm = fake_engines.build(max_batch_size=2, settings={"fail_all_at": 2})
    control = fake_engines.control
    results = [llm.generate_async([5 + i], fake_engines.params()) for i in range(3)]
    control.step(12)

    for result in results[:2]:
        with pytest.raises(RequestError, match="forward failed"):
            await anext(result)
    assert len((await results[2]).outputs[0].token_ids) == 8
    assert control.view().num_used_blocks == 0
    assert llm._check_health()


async def test_a_hang_is_silent_until_it_is_released(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(settings={"hang_at": 2})
    control = fake_engines.control
    result = llm.generate_async([5], fake_engines.params(), streaming=True)
    control.step()
    with pytest.raises(TimeoutError):
        control.step(1, timeout_s=0.05)

    assert llm._check_health()
    assert control.view().is_alive
    control.release()
    control.wait_for_iteration(2)
    await anext(result)
    assert len((await anext(result)).outputs[0].token_ids) == 2


def test_shutdown_blocks_as_long_as_it_is_told_and_once(fake_engines: FakeEngines) -> None:
    llm = fake_engines.build(settings={"shutdown_s": 60.0})
    control = fake_engines.control
    thread = threading.Thread(target=llm.shutdown, name="shuts down")
    thread.start()
    while not control.shutdown_threads:
        thread.join(0.001)
    assert thread.is_alive()

    llm.shutdown()
    control.release()
    thread.join(10)

    assert control.shutdown_threads == ("shuts down",)
    assert not control.view().is_alive


@pytest.mark.parametrize("is_fatal", [False, True])
async def test_a_killed_worker_process_takes_the_engine_along(
    fake_engines: FakeEngines, is_fatal: bool
) -> None:
    settings = {"worker_process": True, "is_worker_death_fatal": is_fatal}
    llm = fake_engines.build(settings=settings)
    control = fake_engines.control
    result = llm.generate_async([5], fake_engines.params(**BUSY), streaming=True)
    control.step()
    await anext(result)
    reader = asyncio.ensure_future(anext(result))
    assert control.worker_pid is not None

    os.kill(control.worker_pid, signal.SIGKILL)
    while control.view().is_alive:
        await turn_loop()
    await turn_loop()

    assert reader.done() == is_fatal
    if is_fatal:
        with pytest.raises(RuntimeError, match="executor failed"):
            await reader
    reader.cancel()


async def test_shutdown_ends_the_worker_process_and_answers_nobody(
    fake_engines: FakeEngines,
) -> None:
    llm = fake_engines.build(settings={"worker_process": True})
    control = fake_engines.control
    result = llm.generate_async([5], fake_engines.params(**BUSY), streaming=True)
    control.step()
    await anext(result)
    reader = asyncio.ensure_future(anext(result))

    llm.shutdown()
    await turn_loop()

    assert not reader.done()
    assert control.worker_pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(control.worker_pid, 0)
    reader.cancel()


def test_a_build_may_fail(fake_engines: FakeEngines) -> None:
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        fake_engines.build(settings={"build_error": "CUDA out of memory"})
    with pytest.raises(RuntimeError, match="visible GPUs"):
        fake_engines.build(settings={"build_error": "", "num_gpus": 1}, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="max_seqs"):
        fake_engines.build(settings={"num_gpus": 8}, max_seqs=3)
    with pytest.raises(ValueError, match="TensorRT backend"):
        fake_engines.build(fast_build=True)
    with pytest.raises(ValueError, match="okenizer"):
        fake_engines.build(guided_decoding_backend="xgrammar")
