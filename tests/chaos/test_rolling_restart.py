"""SIGUSR2 replaces all fronts and the engine, and no request fails (rolling restart)."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc

from penstock.client import Client, PoolConfig, Tokens
from support.service import Stream, simulated, started, until_gone
from support.timeout import TEST_TIMEOUT_S

NUM_CALLERS = 12
PROMPT = [5, 6, 7]


class Load:
    """Clients that send requests until stopped."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_over = False
        self.num_done = 0

    async def run(self) -> None:
        while not self._is_over:
            num_tokens = 0
            async for event in self._client.generate(
                PROMPT, max_tokens=20, ignore_eos=True, deadline_s=TEST_TIMEOUT_S
            ):
                num_tokens += event.num_tokens if isinstance(event, Tokens) else 0
            assert num_tokens == 20
            self.num_done += 1

    def stop(self) -> None:
        self._is_over = True


async def test_a_rolling_restart_fails_no_request() -> None:
    arguments = [*simulated(), "--fronts", "2", "--drain-timeout-s", "30"]
    async with started(*arguments) as service:
        engine, fronts = await service.next_pids(2)
        async with Client([service.address], pool=PoolConfig(num_channels=4)) as client:
            load = Load(client)
            callers = [asyncio.create_task(load.run()) for _ in range(NUM_CALLERS)]
            channel = service.channel()
            # Its front is replaced and its engine restarts, but it runs to its end.
            long = Stream(channel, 400)
            await long.until_running()
            service.signal(signal.SIGUSR2)
            await service.until_logged("rolling restart: done")
            new_engine, new_fronts = await service.next_pids(2)
            assert new_engine != engine
            assert not set(new_fronts) & set(fronts)
            for pid in (engine, *fronts):
                await until_gone(pid)
            assert await long.outcome() is grpc.StatusCode.OK
            assert long.num_tokens == 400
            num_before = load.num_done
            assert not [caller for caller in callers if caller.done()]
            while load.num_done < num_before + NUM_CALLERS:
                done, _ = await asyncio.wait(callers, timeout=0.1)
                assert not done
            load.stop()
            await asyncio.gather(*callers)
            await channel.close()
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_a_drain_aborts_a_rolling_restart() -> None:
    arguments = [*simulated(), "--fronts", "2", "--drain-timeout-s", "600"]
    async with started(*arguments) as service, service.channel() as channel:
        running = Stream(channel, 100)
        await running.until_running()
        service.signal(signal.SIGUSR2)
        await service.until_logged("rolling restart: replacing front 1")
        service.signal(signal.SIGUSR2)
        await service.until_logged("a rolling restart is under way already")
        service.signal(signal.SIGTERM)
        assert await running.outcome() is grpc.StatusCode.OK
        assert await service.ended() == 0


async def test_without_replay_the_engine_is_not_replaced() -> None:
    arguments = [*simulated(), "--fronts", "1", "--max-replays", "0"]
    async with started(*arguments) as service, service.channel() as channel:
        engine, fronts = await service.next_pids(1)
        running = Stream(channel, 100)
        await running.until_running()
        service.signal(signal.SIGUSR2)
        await service.until_logged("the engine is not replaced")
        await until_gone(fronts[0])
        os.kill(engine, 0)
        assert await running.outcome() is grpc.StatusCode.OK
