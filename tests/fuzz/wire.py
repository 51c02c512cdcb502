"""Sends mutated messages of every method to a live server, and counts the statuses of the calls.

It does not start the server. The tests and the benchmark import it; it is also a program:

    python -m fuzz.wire ADDRESS NUM [SEED]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

import grpc
import grpc.aio

from fuzz.corpus import MULTIPLEX, STREAMING, mutated, seeds

C = grpc.StatusCode
CALL_TIMEOUT_S = 60.0
NUM_AT_ONCE = 32
EXPECTED = frozenset(
    {
        *(C.OK, C.INVALID_ARGUMENT, C.RESOURCE_EXHAUSTED, C.NOT_FOUND, C.UNIMPLEMENTED),
        # Some have the id of another request, a deadline, or an order that is not possible now.
        *(C.ALREADY_EXISTS, C.DEADLINE_EXCEEDED, C.FAILED_PRECONDITION, C.OUT_OF_RANGE, C.ABORTED),
    }
)


class WireFuzz:
    """Sends mutated messages. `codes`: number of calls by status; `odd`: the first calls that ended
    with a forbidden status.
    """

    def __init__(self, seed: str = "wire") -> None:
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.odd: list[tuple[str, str, str]] = []
        self._draw = random.Random(seed)
        self._seeds = seeds()
        self._others = dict(enumerate(data for some in self._seeds.values() for data in some))

    async def run(self, channel: grpc.aio.Channel, num_calls: int) -> None:
        left = iter(range(num_calls))

        async def work() -> None:
            for _ in left:
                await self._call(channel)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(work())

    async def _call(self, channel: grpc.aio.Channel) -> None:
        path = self._draw.choice(list(self._seeds))
        data = mutated(self._draw.choice(self._seeds[path]), self._draw, self._others)
        code = await _outcome(channel, path, data)
        self.codes[code] += 1
        if code not in EXPECTED and len(self.odd) < 10:
            self.odd.append((path, code.name, data.hex()))


async def _outcome(channel: Any, path: str, data: bytes) -> grpc.StatusCode:
    """Return the status of the call; OK for a stream that was cancelled after its first message."""
    call: Any
    if path in STREAMING:
        call = channel.unary_stream(path)(data, timeout=CALL_TIMEOUT_S)
    elif path == MULTIPLEX:
        call = channel.stream_stream(path)(timeout=CALL_TIMEOUT_S)
    else:
        call = channel.unary_unary(path)(data, timeout=CALL_TIMEOUT_S)
    try:
        if path == MULTIPLEX:
            await call.write(data)
            await call.done_writing()
        if path in STREAMING or path == MULTIPLEX:
            message: object = await call.read()
            if message is not grpc.aio.EOF:
                call.cancel()
                return C.OK
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.InvalidStateError:
        # Rejected while its command was written.
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def _main(address: str, num_calls: int, seed: str) -> dict[str, Any]:
    fuzz = WireFuzz(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        await fuzz.run(channel, num_calls)
    return {"codes": {code.name: count for code, count in fuzz.codes.items()}, "odd": fuzz.odd}


if __name__ == "__main__":
    where, count, *rest = sys.argv[1:]
    print(json.dumps(asyncio.run(_main(where, int(count), rest[0] if rest else "wire"))))
