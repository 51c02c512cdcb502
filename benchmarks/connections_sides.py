"""The clients of connections.py: they send short requests in a loop and report latencies.

    async MODE ADDRESS CONCURRENCY SECONDS CA    Penstock's client; MODE of MODES; CA: the PEM file
                                                 of the authority for TLS, "-" for plain text
    blocking ADDRESS CONCURRENCY SECONDS         CONCURRENCY threads, each with one blocking call at
                                                 a time

Each measures for SECONDS after a warm-up of a quarter of that time, and prints one line of JSON:
the figures of the requests that ended after the warm-up. The CPU time and the number of requests
include the warm-up.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import grpc
import numpy as np

from load import closed_loop
from penstock.client import NO_RETRY, Client, PenstockError, PoolConfig, TlsConfig, TokenPrompt
from penstock.v1 import generation_service_pb2_grpc
from penstock.v1.generation_service_pb2 import GenerateRequest
from report import percentile_ms
from services import request
from usage import print_usage

NEW, POOLED, MULTIPLEXED = "new", "pooled", "multiplexed"
MODES = (NEW, POOLED, MULTIPLEXED)
NUM_TOKENS = 2
DEADLINE_S = 10.0
_WARM_SHARE = 0.25
_NUM_CHANNELS = 4
_PROMPT = TokenPrompt(ids=(5, 6, 7, 8))


class Tally:
    """Collects the results of requests that end in the `duration_s` seconds after a warm-up."""

    def __init__(self, duration_s: float) -> None:
        self.whole_s = duration_s * (1 + _WARM_SHARE)
        self._from_s = time.perf_counter() + _WARM_SHARE * duration_s
        self._lock = threading.Lock()
        self._num_all = self._num_failed = 0
        self._took_s: list[float] = []

    @contextlib.contextmanager
    def counting(self, *failures: type[Exception]) -> Generator[None]:
        """Count the `with` block as one request, and record its duration. `failures`: exceptions
        that mark the request as failed; they are suppressed.
        """
        began_s = time.perf_counter()
        is_good = True
        try:
            yield
        except failures:
            is_good = False
        now_s = time.perf_counter()
        with self._lock:
            self._num_all += 1
            self._num_failed += now_s >= self._from_s and not is_good
        if now_s >= self._from_s and is_good:
            self._took_s.append(now_s - began_s)

    def figures(self) -> dict[str, float]:
        took_s = self._took_s or [DEADLINE_S]
        return {
            "per_s": len(self._took_s) / (time.perf_counter() - self._from_s),
            "num_failed": self._num_failed,
            "mean_ms": float(np.mean(took_s)) * 1e3,
            "p50_ms": percentile_ms(took_s, 50),
            "p99_ms": percentile_ms(took_s, 99),
            "client_ms": time.process_time() * 1e3 / max(1, self._num_all),
            "num_all": self._num_all,
        }


async def run_async(
    mode: str, address: str, concurrency: int, duration_s: float, ca: Path | None
) -> dict[str, float]:
    """Run a closed loop of `concurrency` tasks; return the figures. `ca`: PEM file for TLS; None:
    plaintext.
    """
    tls = False if ca is None else TlsConfig(ca=ca)
    pool = PoolConfig(num_channels=_NUM_CHANNELS)
    tally = Tally(duration_s)

    async def send(client: Client) -> None:
        async for _ in client.generate(
            _PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, deadline_s=DEADLINE_S
        ):
            pass

    async def call(_: int) -> None:
        with tally.counting(PenstockError):
            if mode == NEW:
                async with Client(address, tls=tls, retry=NO_RETRY) as client:
                    await send(client)
            else:
                await send(shared)

    async with Client(
        address, tls=tls, retry=NO_RETRY, pool=pool, multiplex=mode == MULTIPLEXED
    ) as shared:
        await closed_loop(call, concurrency, tally.whole_s)
    return tally.figures()


def run_blocking(address: str, concurrency: int, duration_s: float) -> dict[str, float]:
    """Run a closed loop of `concurrency` threads on one channel; return the figures."""
    message = GenerateRequest.FromString(request(NUM_TOKENS))
    tally = Tally(duration_s)
    end_s = time.monotonic() + tally.whole_s
    with grpc.insecure_channel(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)

        def keep_going() -> None:
            while time.monotonic() < end_s:
                with tally.counting(grpc.RpcError):
                    for _ in stub.Generate(message, timeout=DEADLINE_S):
                        pass

        threads = [threading.Thread(target=keep_going) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return tally.figures()


def main(role: str, *rest: str) -> None:
    """Run the process of `role` with its arguments."""
    if role == "async":
        import uvloop

        mode, address, concurrency, duration_s, ca = rest
        authority = None if ca == "-" else Path(ca)
        found = uvloop.run(run_async(mode, address, int(concurrency), float(duration_s), authority))
    else:
        address, concurrency, duration_s = rest
        found = run_blocking(address, int(concurrency), float(duration_s))
    print(json.dumps(found))


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=4)
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
