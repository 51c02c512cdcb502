"""kill -9 of the engine under 64 live streams: how long until every client knows, and serves again.

Every round is a fresh service with the demo model, without replay; requests are not tried again.
Goal: all streams end with UNAVAILABLE within 1 s. With replay: survival.py.
"""

import asyncio
import contextlib
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass

from penstock.client import NO_RETRY, Client, PenstockError, Tokens, Unavailable
from report import Check, arguments, print_checks, print_table, write_json

NUM_STREAMS = 64
GOAL_S = 1.0
LIMIT_S = 60.0
_READY = re.compile(r"penstock ready on (\S+) ")
_ENGINE = re.compile(r"engine is ready: pid=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """`first_s`, `last_s`: from the kill to the first and last stream's status. `serving_s`: to
    SERVING again. `num_unavailable` of NUM_STREAMS streams ended as they should."""

    first_s: float
    last_s: float
    serving_s: float
    num_unavailable: int


@contextlib.asynccontextmanager
async def service() -> AsyncGenerator[tuple[str, int]]:
    """Address and the engine's process id of a fresh service; ended at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.tools", "serve", "--port", "0"),
        *("--operations-port", "off", "--metrics-port", "off", "--max-replays", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        engine = None
        while engine is None:
            line = (await process.stderr.readline()).decode()
            if not line:
                raise SystemExit(f"the service did not start: exit code {await process.wait()}")
            engine = _ENGINE.search(line)
        ready = _READY.match((await process.stdout.readline()).decode())
        if ready is None:
            raise SystemExit("the service did not say where it is")
        yield ready[1], int(engine[1])
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()


async def until_told(client: Client, has_output: asyncio.Event) -> tuple[float, bool]:
    """When one long stream ended, monotonic seconds, and whether with UNAVAILABLE."""
    error: PenstockError | None = None
    try:
        async for event in client.generate("ROMEO:\n", max_tokens=1000, ignore_eos=True):
            if isinstance(event, Tokens):
                has_output.set()
    except PenstockError as failed:
        error = failed
    return time.perf_counter(), isinstance(error, Unavailable)


async def one_round() -> Round:
    """Start, load, kill, wait."""
    async with service() as (address, engine_pid), Client(address, retry=NO_RETRY) as client:
        flags = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(until_told(client, flag)) for flag in flags]
        await asyncio.gather(*(flag.wait() for flag in flags))
        os.kill(engine_pid, signal.SIGKILL)
        killed_s = time.perf_counter()
        ends = await asyncio.gather(*streams)
        await client.wait_until_serving(deadline_s=LIMIT_S)
        serving_s = time.perf_counter() - killed_s
    return Round(
        first_s=min(at for at, _ in ends) - killed_s,
        last_s=max(at for at, _ in ends) - killed_s,
        serving_s=serving_s,
        num_unavailable=sum(is_unavailable for _, is_unavailable in ends),
    )


def main() -> None:
    """Measure, print, write."""
    options = arguments(__doc__ or "").parse_args()
    rounds: list[Round] = []
    for index in range(10 if options.full else 3):
        print(f"round {index + 1}", file=sys.stderr)
        rounds.append(asyncio.run(asyncio.wait_for(one_round(), LIMIT_S)))
    print_table(
        f"kill -9 of the engine under {NUM_STREAMS} streams",
        ("first told s", "last told s", "serving again s", "UNAVAILABLE"),
        [(r.first_s, r.last_s, r.serving_s, r.num_unavailable) for r in rounds],
    )
    checks = [
        Check(
            name="last stream told, worst round",
            value=max(r.last_s for r in rounds),
            goal=GOAL_S,
            unit="s",
            sense="at most",
        ),
        Check(
            name="streams that ended with UNAVAILABLE, worst round",
            value=min(r.num_unavailable for r in rounds),
            goal=NUM_STREAMS,
            unit="streams",
            sense="at least",
        ),
    ]
    print_checks(checks)
    print(f"\nserving again, median: {statistics.median(r.serving_s for r in rounds):.1f} s")
    write_json(options.json, [asdict(r) for r in rounds], checks)


if __name__ == "__main__":
    main()
