"""The clients of connections.py: they send short requests in a loop and report latencies.

    async MODE ADDRESS CONCURRENCY SECONDS CA    Penstock's client; MODE of MODES; CA: the PEM file
                                                 of the authority for TLS, "-" for plain text
    blocking ADDRESS CONCURRENCY SECONDS         a thread and a blocking call for each request

Each prints one line of JSON, `Seen`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import numpy as np

from penstock.client import (
    NO_RETRY,
    Client,
    Finished,
    PenstockError,
    PoolConfig,
    TlsConfig,
    TokenPrompt,
)
from penstock.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    options_pb2,
    prompt_pb2,
)
from usage import print_usage

NEW, POOLED, MULTIPLEXED = "new", "pooled", "multiplexed"
MODES = (NEW, POOLED, MULTIPLEXED)
NUM_TOKENS = 2
DEADLINE_S = 10.0
_NUM_CHANNELS = 4
_PROMPT = TokenPrompt(ids=(5, 6, 7, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results of a client, for requests that ended within the measured window; latencies in ms.

    `client_ms`: the CPU time of the client per request.
    """

    num_requests: int
    num_all: int
    client_ms: float
    num_failed: int
    elapsed_s: float
    mean_ms: float
    p50_ms: float
    p99_ms: float

    @property
    def per_s(self) -> float:
        return self.num_requests / self.elapsed_s


class Tally:
    """Collects durations of requests; those of the warm-up at the start are not counted."""

    def __init__(self, duration_s: float) -> None:
        self._from_s = time.perf_counter() + 0.25 * duration_s
        self.until_s = self._from_s + duration_s
        self._took_s: list[float] = []
        self._num_failed = 0
        self._num_all = 0

    @property
    def goes_on(self) -> bool:
        return time.perf_counter() < self.until_s

    def count(self, began_s: float, *, is_good: bool) -> None:
        now_s = time.perf_counter()
        self._num_all += 1
        if not self._from_s <= now_s:
            return
        if is_good:
            self._took_s.append(now_s - began_s)
        else:
            self._num_failed += 1

    def seen(self) -> Seen:
        took_ms = np.array(self._took_s or [DEADLINE_S]) * 1e3
        p50, p99 = np.percentile(took_ms, [50, 99])
        return Seen(
            num_requests=len(self._took_s),
            num_all=self._num_all,
            client_ms=time.process_time() * 1e3 / max(1, self._num_all),
            num_failed=self._num_failed,
            elapsed_s=time.perf_counter() - self._from_s,
            mean_ms=float(took_ms.mean()),
            p50_ms=float(p50),
            p99_ms=float(p99),
        )


async def _request(client: Client) -> None:
    async for event in client.generate(
        _PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, deadline_s=DEADLINE_S
    ):
        if isinstance(event, Finished):
            return


async def run_async(
    mode: str, address: str, concurrency: int, duration_s: float, ca: Path | None
) -> Seen:
    """Run a closed loop of `concurrency` tasks; return the results."""
    pool = PoolConfig(num_channels=_NUM_CHANNELS)
    tls = False if ca is None else TlsConfig(ca=ca)
    async with contextlib.AsyncExitStack() as stack:
        if mode == NEW:

            async def call() -> None:
                async with Client(address, tls=tls, retry=NO_RETRY) as client:
                    await _request(client)
        else:
            client = await stack.enter_async_context(
                Client(address, tls=tls, retry=NO_RETRY, pool=pool, multiplex=mode == MULTIPLEXED)
            )

            async def call() -> None:
                await _request(client)

        tally = Tally(duration_s)
        await asyncio.gather(*(_keep_going(call, tally) for _ in range(concurrency)))
        return tally.seen()


async def _keep_going(call: Callable[[], Awaitable[None]], tally: Tally) -> None:
    while tally.goes_on:
        began_s = time.perf_counter()
        try:
            await call()
        except PenstockError:
            tally.count(began_s, is_good=False)
        else:
            tally.count(began_s, is_good=True)


def run_blocking(address: str, concurrency: int, duration_s: float) -> Seen:
    """Run a closed loop of `concurrency` threads on one channel; return the results."""
    request = generation_service_pb2.GenerateRequest(
        token_prompt=prompt_pb2.TokenPrompt(ids=_PROMPT.ids),
        stopping=options_pb2.StoppingOptions(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    with grpc.insecure_channel(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        tally, lock = Tally(duration_s), threading.Lock()

        def keep_going() -> None:
            while tally.goes_on:
                began_s = time.perf_counter()
                is_good = True
                try:
                    for _ in stub.Generate(request, timeout=DEADLINE_S):
                        pass
                except grpc.RpcError:
                    is_good = False
                with lock:
                    tally.count(began_s, is_good=is_good)

        threads = [threading.Thread(target=keep_going) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tally.seen()


def main(role: str, *rest: str) -> None:
    """Run one of the processes."""
    if role == "async":
        import uvloop

        mode, address, concurrency, duration_s, ca = rest
        authority = None if ca == "-" else Path(ca)
        seen = uvloop.run(run_async(mode, address, int(concurrency), float(duration_s), authority))
    else:
        address, concurrency, duration_s = rest
        seen = run_blocking(address, int(concurrency), float(duration_s))
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=4)
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
