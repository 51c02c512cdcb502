"""A process that traces a few requests as its environment says, and tells what became of them.

Run as a program: `traced_process.py NUM_REQUESTS CLOSE_LIMIT_S`. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
EXIT_LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """`close_s`: how long closing took; `whole_s`: from start to exit. `output`: what came before
    the last line of stdout."""

    counters: dict[str, int]
    close_s: float
    whole_s: float
    output: str
    errors: str


def run_traced(
    variables: Mapping[str, str], *, num_requests: int = 3, close_limit_s: float = 10.0
) -> Outcome:
    """Trace in a process of its own, with no other `OTEL_*` variables than these."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("OTEL_")}
    environment["PYTHONPATH"] = os.pathsep.join([*(part for part in sys.path if part), str(TESTS)])
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, str(num_requests), str(close_limit_s)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=EXIT_LIMIT_S,
        check=False,
    )
    whole_s = time.monotonic() - begun_s
    assert done.returncode == 0, done.stderr
    *output, last = done.stdout.splitlines()
    told = json.loads(last)
    return Outcome(told["counters"], told["close_s"], whole_s, "\n".join(output), done.stderr)


def _main() -> None:
    from penstock.server.observe.config import TracingConfig
    from penstock.server.observe.spans.export import start_tracing
    from support.request_records import request_record

    num_requests, close_limit_s = int(sys.argv[1]), float(sys.argv[2])
    tracing = start_tracing(TracingConfig(is_on=True), model="tiny")
    for number in range(1, num_requests + 1):
        tracing.take_records([request_record(number)])
    begun_s = time.monotonic()
    tracing.close(close_limit_s)
    close_s = time.monotonic() - begun_s
    print(json.dumps({"counters": tracing.counters(), "close_s": close_s}), flush=True)


if __name__ == "__main__":
    _main()
