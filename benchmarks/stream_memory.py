"""Measures the memory of fronts (gRPC server processes) per open stream, and its growth per request
(leaks).

Measures the resident memory per stream that waits and per stream that gets a token every quarter of
a second, with 1,000 streams, and with 5,000 streams on two processes (each accepts up to 4,096).
Also measures the growth per request, for requests that finish, and for requests whose client
disconnects after the first token. gRPC's core is known to keep 100 to 200 bytes for each
disconnected request.

    python benchmarks/stream_memory.py [--full] [--json FILE]

Resident memory varies by a megabyte. The growth over 10,000 requests, which take under a minute, is
reported, but it is checked against its goal only with --full, over 100,000 requests."""

from __future__ import annotations

import json
import subprocess
import time
from argparse import Namespace
from dataclasses import dataclass

import numpy as np
import psutil

import native_build
from report import Outcome, RunFailed, arguments, at_most, print_rows, progress, run
from services import (
    MEASURED,
    capacity,
    client_command,
    request,
    run_client,
    service,
    simulated,
)

STREAMS = (1000, 5000)
MAX_STREAM_BYTES = 64 * 1024
MAX_GROWTH_BYTES = {"finished": 20.0, "left": 200.0}
"""Maximum growth of memory in bytes per request, over at least MIN_JUDGED_REQUESTS requests: for
requests that finish, and for disconnected ones, for which gRPC's core keeps some bytes.
"""
MIN_JUDGED_REQUESTS = 100_000
NUM_BLOCKS = 10
_WARM_REQUESTS = 400
_NUM_CONNECTIONS = 8
_SETTLE_S = 2.0
_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMemory:
    """The memory of open streams, in bytes per stream. `base_mib`: resident memory of a front
    before they were opened.
    """

    kind: str
    num_streams: int
    num_fronts: int
    base_mib: float
    stream_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Resident bytes of the front process before the first and after each block of requests.

    `request_bytes`: the slope over the second half of the blocks, bytes per request.
    """

    kind: str
    num_requests: int
    per_s: float
    resident_bytes: list[int]
    request_bytes: float


def resident_bytes(fronts: list[int]) -> int:
    """Return the resident bytes of all front processes together."""
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in fronts)


def churn(port: int, num_requests: int, num_tokens: int, leave_after: int = 0) -> float:
    """Run requests, 64 at a time; return requests per second. `leave_after`: number of tokens after
    which each client disconnects; 0: never. Raises RunFailed.
    """
    options: dict[str, object] = {
        "port": port,
        "streams": 64,
        "connections": 4,
        "request": request(num_tokens),
        "requests": num_requests,
        "leave-after": leave_after,
        "limit": _LIMIT_S,
    }
    found = run_client("churn", options, limit_s=_LIMIT_S)
    num_good = found["num_left"] if leave_after else found["num_finished"]
    if num_good != num_requests:
        raise RunFailed(f"{num_good} of {num_requests} requests completed: {found}")
    return num_requests / float(found["elapsed_s"])


def measure_open_streams(num_streams: int, *, is_active: bool) -> StreamMemory:
    """Open `num_streams` concurrent streams; return their memory. `is_active`: each gets a token
    every quarter of a second, otherwise all wait. Raises RunFailed.
    """
    num_fronts = 1 if num_streams <= 4000 else 2
    # Requests after the warm-up wait, because the step of the first one does not end.
    stuck: dict[str, object] = {
        "kind": "slow_step",
        "at_request": _WARM_REQUESTS + 1,
        "seconds": 3600.0,
    }
    steps = simulated(0.25) if is_active else simulated(0.0, faults=[stuck])
    # On a busy machine opening takes a minute; the endless step must not count as a hang.
    sizes = (*capacity(num_streams, 512), *MEASURED, "--engine-hang-s", "3600")
    with service(*steps, *sizes, num_fronts=num_fronts) as serving:
        port, fronts = serving.port, serving.pids("front")
        churn(port, _WARM_REQUESTS, 2)
        time.sleep(_SETTLE_S)
        base = resident_bytes(fronts)
        options: dict[str, object] = {
            "port": port,
            "streams": num_streams,
            "connections": _NUM_CONNECTIONS * num_fronts,
            "request": request(480),
            "until": "token" if is_active else "message",
            "limit": _LIMIT_S,
        }
        command = client_command("hold", options)
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holding:
            assert holding.stdout is not None
            found = json.loads(holding.stdout.readline())
            if found["num_open"] != num_streams or found["num_ended"]:
                raise RunFailed(f"not all streams are open: {found}")
            time.sleep(_SETTLE_S)
            grown = resident_bytes(fronts) - base
            assert holding.stdin is not None
            holding.stdin.close()
    return StreamMemory(
        kind="active" if is_active else "waiting",
        num_streams=num_streams,
        num_fronts=num_fronts,
        base_mib=base / 2**20 / num_fronts,
        stream_bytes=grown / num_streams,
    )


def measure_growth(
    kind: str, num_requests: int, num_tokens: int, leave_after: int = 0
) -> MemoryGrowth:
    """Run blocks of requests on one front; return the memory before the first and after each."""
    block = num_requests // NUM_BLOCKS
    with service(*simulated(0.001), *capacity(64, 64), *MEASURED) as serving:
        port, fronts = serving.port, serving.pids("front")
        churn(port, _WARM_REQUESTS, num_tokens, leave_after)
        resident, rates = [resident_bytes(fronts)], []
        for number in range(NUM_BLOCKS):
            rates.append(churn(port, block, num_tokens, leave_after))
            resident.append(resident_bytes(fronts))
            progress(
                f"{kind}: {block * (number + 1):,} of {num_requests:,}"
                f"  {resident[-1] / 2**20:.1f} MiB"
            )
    # Some allocations happen only once, so only the second half shows continuous growth.
    half = np.array(resident[NUM_BLOCKS // 2 :], dtype=np.float64)
    slope = float(np.polyfit(np.arange(len(half)) * block, half, 1)[0])
    return MemoryGrowth(
        kind=kind,
        num_requests=block * NUM_BLOCKS,
        per_s=float(np.median(rates)),
        resident_bytes=resident,
        request_bytes=slope,
    )


def measure(options: Namespace) -> Outcome:
    """Measure the open streams, then the growth."""
    native_build.load_client()
    num_requests = MIN_JUDGED_REQUESTS if options.full else 10_000
    holds = [
        measure_open_streams(num_streams, is_active=is_active)
        for num_streams in STREAMS
        for is_active in (False, True)
    ]
    growths = [
        measure_growth("finished", num_requests, num_tokens=2),
        measure_growth("left", num_requests, num_tokens=48, leave_after=1),
    ]
    print_rows("Open streams", holds)
    print_rows(
        "Requests one after another", growths, "kind", "num_requests", "per_s", "request_bytes"
    )
    return {"held": holds, "growth": growths}, [
        *(
            at_most(
                f"{one.num_streams:,} {one.kind} streams: memory of each",
                one.stream_bytes,
                *(float(MAX_STREAM_BYTES), "bytes"),
            )
            for one in holds
        ),
        *(
            at_most(
                f"{one.num_requests:,} requests {one.kind}: growth for each",
                one.request_bytes,
                *(MAX_GROWTH_BYTES[one.kind], "bytes"),
                is_settled=num_requests >= MIN_JUDGED_REQUESTS,
            )
            for one in growths
        ),
    ]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
