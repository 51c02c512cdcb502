"""A request that crashes every engine fails alone, whichever front the other requests use."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import grpc
import grpc.aio

from support.service import Stream, simulated, started
from support.timeout import TEST_TIMEOUT_S

OK = grpc.StatusCode.OK
POISON = 300
"""A token id that the scripted fault looks for in prompts."""


def deadly(kind: str, at_output: int, **settings: object) -> list[str]:
    """Return arguments of `serve` with a fault of this kind, at output token `at_output` of a
    request whose prompt contains POISON. `settings`: other fields of the fault.
    """
    fault = {"kind": kind, "at_prompt_token": POISON, "at_output": at_output, "max_times": 1000}
    return simulated(faults=[{**fault, **settings}])


def poison(channel: grpc.aio.Channel) -> Stream:
    return Stream(channel, 100, POISON)


async def texts(channel: grpc.aio.Channel, prompts: Sequence[int], num: int) -> list[str]:
    streams = [Stream(channel, num, first) for first in prompts]
    assert [await one.outcome() for one in streams] == [OK] * len(streams)
    return [one.text for one in streams]


async def test_a_request_that_kills_the_engine_twice_is_rejected_and_the_others_continue() -> None:
    arguments = [*deadly("process_exits", 5), "--fronts", "2"]
    async with started(*arguments) as service:
        channels = [service.channel() for _ in range(4)]
        expected = await texts(channels[0], range(12), 150)
        innocent = [Stream(channels[first % 4], 150, first) for first in range(12)]
        await asyncio.gather(*(one.until_running() for one in innocent))
        guilty = poison(channels[1])
        assert await guilty.outcome() is grpc.StatusCode.INTERNAL
        assert not guilty.has_finished
        outcomes = await asyncio.gather(*(one.outcome() for one in innocent))
        assert outcomes == [OK] * 12
        assert [one.text for one in innocent] == expected
        # Two engines have died because of it, and the third is running.
        for _ in range(3):
            await service.next_pid("engine")
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert service.pids["engine"].empty()
        await asyncio.gather(*(channel.close() for channel in channels))


async def test_a_request_that_hangs_the_engine_twice_is_rejected_and_the_others_continue() -> None:
    arguments = [*deadly("hang", 3), "--engine-hang-s", "5"]
    async with started(*arguments) as service, service.channel() as channel:
        innocent = [Stream(channel, 150, first) for first in range(4)]
        await asyncio.gather(*(one.until_running() for one in innocent))
        assert await poison(channel).outcome() is grpc.StatusCode.INTERNAL
        assert [await one.outcome() for one in innocent] == [OK] * 4
        assert [one.num_tokens for one in innocent] == [150] * 4


async def test_new_requests_do_not_wait_for_probation() -> None:
    arguments = deadly("executor_dies", 0)
    async with started(*arguments) as service, service.channel() as channel:
        others = [Stream(channel, 300, first) for first in range(4)]
        await asyncio.gather(*(one.until_running() for one in others))
        guilty = asyncio.create_task(poison(channel).outcome())
        await service.until_logged("the executor failed")
        # A request that arrives without an engine, or while suspects are tried, is run too.
        late = asyncio.create_task(_until_ok(channel))
        assert await guilty is grpc.StatusCode.INTERNAL
        await late
        assert [await one.outcome() for one in others] == [OK] * 4


async def _until_ok(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while await Stream(channel, 5, 60).outcome() is not OK:
            pass
