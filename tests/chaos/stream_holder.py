"""A client process that holds many streams open: `python -m chaos.stream_holder ADDRESS COUNT`.

Prints "running" on stdout when each of its streams has a token, and reads until all have ended. The
caller stops or kills it.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from support.service import Stream
from support.timeout import TEST_TIMEOUT_S

NUM_TOKENS = 900


@contextlib.asynccontextmanager
async def holder(address: str, count: int) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Start a client process with `count` running streams; it is killed at the end of the block.

    If a stream is rejected or loses its engine, the process exits without a line on stdout.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "chaos.stream_holder", address, str(count)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def hold(address: str, count: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        running = [Stream(channel, NUM_TOKENS, first) for first in range(count)]
        await asyncio.gather(*(one.until_running() for one in running))
        print("running", flush=True)
        with contextlib.suppress(AssertionError):
            await asyncio.gather(*(one.outcome() for one in running))


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], int(sys.argv[2])))
