"""A process that traces a few requests as its environment configures, and reports the result.

Run as a program: `traced_process.py NUM_REQUESTS CLOSE_LIMIT_S`. Closes the tracing when a line
arrives on stdin or stdin ends, and prints one line of JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
EXIT_LIMIT_S = 100.0


@dataclass(frozen=True)
class Outcome:
    """The result of a process. `counters`: the counters of its tracing. `close_s`: duration of
    closing, seconds; `end_s`: time from the start of closing to the exit, seconds. `output`: stdout
    without the last line; `errors`: stderr.
    """

    counters: dict[str, int]
    close_s: float
    end_s: float
    output: str
    errors: str


def run_traced(
    variables: Mapping[str, str],
    *,
    num_requests: int = 3,
    close_limit_s: float = 50.0,
    before_close: Callable[[], object] = lambda: None,
) -> Outcome:
    """Trace `num_requests` requests in a child process with only these `OTEL_*` variables.
    `before_close` is called before the process is asked to close.
    """
    environment = {key: text for key, text in os.environ.items() if not key.startswith("OTEL_")}
    environment["PYTHONPATH"] = os.pathsep.join([*(part for part in sys.path if part), str(TESTS)])
    process = subprocess.Popen(
        [sys.executable, __file__, str(num_requests), str(close_limit_s)],
        env={**environment, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            before_close()
            stdout, errors = process.communicate("close\n", timeout=EXIT_LIMIT_S)
        except BaseException:
            process.kill()
            raise
    ended_s = time.monotonic()
    assert process.returncode == 0, errors
    *output, last = stdout.splitlines()
    reported = json.loads(last)
    # The clock is the same for all processes of a machine.
    end_s = ended_s - reported["closing_since_s"]
    return Outcome(reported["counters"], reported["close_s"], end_s, "\n".join(output), errors)


def _main() -> None:
    from penstock.server.observe.config import TracingConfig
    from penstock.server.observe.spans.export import start_tracing
    from support.reports import request_record

    num_requests, close_limit_s = int(sys.argv[1]), float(sys.argv[2])
    tracing = start_tracing(TracingConfig(is_on=True), model="tiny")
    for number in range(1, num_requests + 1):
        tracing.add_records([request_record(number)])
    sys.stdin.readline()
    begun_s = time.monotonic()
    tracing.close(close_limit_s)
    close_s = time.monotonic() - begun_s
    reported = {"counters": tracing.counters(), "close_s": close_s, "closing_since_s": begun_s}
    print(json.dumps(reported), flush=True)


if __name__ == "__main__":
    _main()
