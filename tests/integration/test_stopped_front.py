import asyncio
import os
import signal
from contextlib import AsyncExitStack

import grpc

from support.service import Stream, simulated, started

NUM_STREAMS = 16
NUM_TOKENS = 400


async def test_the_streams_of_the_other_front_continue_to_their_end() -> None:
    async with (
        started(*simulated(), "--fronts", "2", "--front-hang-s", "0") as service,
        AsyncExitStack() as channels,
    ):
        stopped, _other = [await service.next_pid("front") for _ in range(2)]
        # A connection for each: the kernel deals them to the fronts.
        streams = [
            Stream(await channels.enter_async_context(service.channel()), NUM_TOKENS, number)
            for number in range(NUM_STREAMS)
        ]
        await asyncio.gather(*(one.until_running() for one in streams))

        os.kill(stopped, signal.SIGSTOP)
        ends = [asyncio.ensure_future(one.outcome()) for one in streams]
        done, held = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert {end.result() for end in done} == {grpc.StatusCode.OK}
        assert held, "no connection is the stopped front's"

        os.kill(stopped, signal.SIGCONT)
        assert set(await asyncio.gather(*ends)) == {grpc.StatusCode.OK}
        assert all(one.num_tokens == NUM_TOKENS and one.has_finished for one in streams)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
