"""A client process that holds many streams open: `python -m support.stream_holder ADDRESS COUNT`.

Prints "running" on stdout when each of its streams has a token, reads on, and prints "ended" when
all are over. The caller stops or kills it.
"""

import asyncio
import contextlib
import sys

import grpc
import grpc.aio

from support.service import stream

NUM_TOKENS = 900


async def hold(address: str, count: int) -> None:
    """Open `count` streams over one connection and read them."""
    async with grpc.aio.insecure_channel(address) as channel:
        running = [stream(channel, NUM_TOKENS, first) for first in range(count)]
        await asyncio.gather(*(one.until_running() for one in running))
        print("running", flush=True)
        with contextlib.suppress(AssertionError):
            await asyncio.gather(*(one.outcome() for one in running))
        print("ended", flush=True)


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], int(sys.argv[2])))
