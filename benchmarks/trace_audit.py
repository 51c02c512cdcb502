"""Checks that every request has exactly one trace, also when engines die.

Runs a service with a short queue. The service sends its traces to an OTLP receiver in this process.
The engine is killed repeatedly. Requests arrive at a fixed rate, some through Multiplex, and end in
all possible ways: completed; client disconnected early or late; cancelled by an RPC; rejected
because of an invalid field, an unknown model, a prompt that is too long or a full queue; expired in
the queue or in the batch; malformed; sent while no engine was running. Each request has its own
trace id. Checks the number of root spans per request, that child spans cover their root span
without gaps of over 1 ms, and that the number of missing traces equals the number that the service
reports as dropped.

    python benchmarks/trace_audit.py [--full] [--rate PER_S] [--json FILE]

A request without a response (the client disconnected immediately, or the call's deadline passed)
may not have reached the service, so it may have no trace, but not several.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from report import Outcome, arguments, at_least, at_most, print_rows, progress, run
from services import Service, service, simulated
from span_audit import audit
from trace_audit_load import drive, make_requests

MAX_GAP_NS = 1_000_000
STEP_S = 0.01
MAX_SEQ_LEN = 256
_SETTLE_S = 20.0
_QUIET_S = 2.0
_TESTS = str(Path(__file__).resolve().parents[1] / "tests")
_OPTIONS = (
    *("--max-num-seqs", "24", "--max-num-waiting", "12"),
    *("--block-size", "16", "--num-blocks", "72", "--max-seq-len", str(MAX_SEQ_LEN)),
    *("--log-level", "error", "--drain-timeout-s", "1"),
)


class EngineKiller(threading.Thread):
    """Kills the engine every `interval_s` until it is stopped, at most `most` times."""

    def __init__(self, service: Service, interval_s: float, most: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._service = service
        self._interval_s = interval_s
        self._most = most
        self._is_over = threading.Event()
        self.num_kills = 0

    def run(self) -> None:
        while self.num_kills < self._most and not self._is_over.wait(self._interval_s):
            for pid in self._service.pids("engine"):
                os.kill(pid, signal.SIGKILL)
                self.num_kills += 1
                progress(f"engine {pid} killed")

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def measure(options: Namespace) -> Outcome:
    """Run one service and all requests. Raises RunFailed."""
    sys.path.insert(0, _TESTS)
    from support.otlp_receiver import grpc_receiver

    num, interval_s = (20_000, 16.0) if options.full else (2_000, 4.0)
    environment = {name: value for name, value in os.environ.items() if name[:5] != "OTEL_"}
    with grpc_receiver() as receiver:
        sizes = (*simulated(STEP_S), "--otlp-endpoint", receiver.endpoint, *_OPTIONS)
        with service(*sizes, num_fronts=2, environment=environment, has_metrics=True) as serving:
            requests = make_requests(num, options.seed, options.rate)
            # After five crashes in a minute the supervisor stops the service; another test covers
            # that.
            killer = EngineKiller(serving, interval_s, most=4 if interval_s < 15 else 1000)
            killer.start()
            answers = asyncio.run(drive(serving.address, requests, MAX_SEQ_LEN))
            killer.stop()
            _settle(serving, lambda: receiver.num_calls)
            num_records = int(serving.total("penstock_records_total"))
            lost = ("penstock_records_dropped_total", "penstock_trace_dropped_total")
            num_dropped = int(sum(serving.total(name) for name in lost))
            exit_code = serving.end()
        found = audit(answers.sent, receiver.spans(), max_gap_ns=MAX_GAP_NS)
    outcomes = [
        {"kind": kind, "ended": ended, "requests": count}
        for (kind, ended), count in sorted(answers.outcomes.items())
    ]
    print_rows("Outcomes as seen by the clients", outcomes)
    print_rows("Spans", [found.names])
    counts = {"records": num_records, "dropped": num_dropped, "kills": killer.num_kills}
    print_rows("In all", [{**counts, "worst gap ms": found.worst_gap_ns * 1e-6}])
    rules = {
        "requests without a root": found.num_missing,
        "requests with several roots": found.num_repeated,
        "spans of no request, or under no root": found.num_unexpected,
        "roots that their children do not tile within 1 ms": found.num_uncovered,
        "children that stick out of their root": found.num_outside,
        "missing roots that the service did not count": abs(found.num_missing - num_dropped),
        "roots more or less than records": abs(found.num_roots + num_dropped - num_records),
        "service that did not end well when it was asked to": int(exit_code != 0),
    }
    return {"audit": found, "outcomes": outcomes, **counts}, [
        *(at_most(name, value, 0) for name, value in rules.items()),
        at_least("engines killed", killer.num_kills, 2),
    ]


def _settle(serving: Service, num_calls: Callable[[], int]) -> None:
    """Wait until no more spans arrive, for at most about 20 s: the records of disconnected requests
    arrive late.
    """
    until_s = time.monotonic() + _SETTLE_S
    last: tuple[float, int] | None = None
    while time.monotonic() < until_s:
        now = (serving.total("penstock_records_total"), num_calls())
        if now == last:
            return
        last = now
        time.sleep(_QUIET_S)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=float, default=150.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    run(parser, measure)


if __name__ == "__main__":
    main()
