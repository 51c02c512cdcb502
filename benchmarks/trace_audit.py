"""Checks that every request has exactly one trace, also when engines die.

Runs a service with a short queue, which sends its traces to an OTLP receiver in this process; its
engine is killed every few seconds. Requests arrive at a fixed rate, some through Multiplex, and end
in all possible ways: completed; client disconnected early or late; cancelled by an RPC; rejected
because of an invalid field, an unknown model, a prompt that is too long or a full queue; expired in
the queue or in the batch; malformed; sent while no engine was running. Each has a separate trace
id. Checks the number of roots per request, that child spans cover their root span without gaps, and
that the number of missing traces equals the number that the service reports as dropped.

    python benchmarks/trace_audit.py [--full] [--rate PER_S] [--json FILE]

A request without a response (the client disconnected immediately, or the call's deadline passed)
may not have reached the service, so it may have no trace, but not several.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

from report import (
    Check,
    RunFailed,
    arguments,
    at_least,
    at_most,
    print_checks,
    print_table,
    progress,
    write_json,
)
from services import Service, service, simulated
from span_audit import Audit, AuditedSpan, audit
from trace_audit_load import Answers, drive, make_requests
from tracing_peers import EXPORT_SERVICE

MAX_GAP_NS = 1_000_000
STEP_S = 0.01
MAX_SEQ_LEN = 256
_SETTLE_S = 20.0
_QUIET_S = 2.0
_OPTIONS = (
    *("--max-num-seqs", "24", "--max-num-waiting", "12"),
    *("--block-size", "16", "--num-blocks", "72", "--max-seq-len", str(MAX_SEQ_LEN)),
    *("--log-level", "error", "--drain-grace-s", "1"),
)


@dataclass(slots=True)
class Receiver:
    """Stores the received messages, as bytes."""

    payloads: list[bytes] = field(default_factory=list[bytes])
    last_s: float = 0.0

    def export(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Handle one call of an exporter."""
        del context
        self.payloads.append(data)
        self.last_s = time.monotonic()
        return b""

    def spans(self) -> Iterator[AuditedSpan]:
        """Yield all received spans."""
        for payload in list(self.payloads):
            for part in otlp.ExportTraceServiceRequest.FromString(payload).resource_spans:
                for scope in part.scope_spans:
                    for span in scope.spans:
                        yield AuditedSpan(
                            trace_id=span.trace_id,
                            span_id=span.span_id,
                            parent_id=span.parent_span_id,
                            name=span.name,
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a run. `num_dropped`: number of records and traces that the service reports as
    dropped.
    """

    audit: Audit
    answers: Answers
    num_dropped: int
    num_records: int
    num_kills: int
    exit_code: int | None


@contextlib.contextmanager
def receiver() -> Generator[tuple[Receiver, str]]:
    """Run a collector in this process; yield it and its endpoint."""
    taken = Receiver()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(taken.export)
    service = grpc.method_handlers_generic_handler(EXPORT_SERVICE, {"Export": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield taken, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


class Killer(threading.Thread):
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


def run(num: int, rate_per_s: float, interval_s: float, seed: int) -> Found:
    """Run one service and all requests. Raises RunFailed."""
    environment = {name: value for name, value in os.environ.items() if name[:5] != "OTEL_"}
    with receiver() as (taken, endpoint):
        options = (*simulated(STEP_S), "--otlp-endpoint", endpoint, *_OPTIONS)
        with service(*options, num_fronts=2, environment=environment, has_metrics=True) as serving:
            asks = make_requests(num, seed, rate_per_s)
            # After five crashes in a minute the supervisor stops the service; another test covers
            # that.
            killer = Killer(serving, interval_s, most=4 if interval_s < 15 else 1000)
            killer.start()
            answers = asyncio.run(drive(serving.address, asks, MAX_SEQ_LEN))
            killer.stop()
            _settle(serving, taken)
            num_records = int(serving.total("penstock_records_total"))
            lost = ("penstock_records_dropped_total", "penstock_trace_dropped_total")
            num_dropped = int(sum(serving.total(name) for name in lost))
            exit_code = serving.end()
    found = audit(answers.sent, taken.spans(), max_gap_ns=MAX_GAP_NS)
    return Found(
        audit=found,
        answers=answers,
        num_dropped=num_dropped,
        num_records=num_records,
        num_kills=killer.num_kills,
        exit_code=exit_code,
    )


def _settle(service: Service, taken: Receiver) -> None:
    """Wait until no more spans arrive, because records of disconnected requests arrive late."""
    begun_s = time.monotonic()
    last_num = -1.0
    while time.monotonic() - begun_s < _SETTLE_S:
        num = service.total("penstock_records_total")
        is_quiet = time.monotonic() - max(taken.last_s, begun_s) > _QUIET_S
        if num == last_num and is_quiet:
            return
        last_num = num
        time.sleep(1.1)


def checks_of(found: Found) -> list[Check]:
    """Return one check per rule, each with a goal of 0 violations."""
    told = found.audit
    rules = {
        "requests without a root": told.num_missing,
        "requests with several roots": told.num_repeated,
        "spans of no request, or under no root": told.num_unexpected,
        "roots that their children do not tile within 1 ms": told.num_uncovered,
        "children that stick out of their root": told.num_outside,
        "missing roots that the service did not count": abs(told.num_missing - found.num_dropped),
        "roots more or less than records": abs(
            told.num_roots + found.num_dropped - found.num_records
        ),
    }
    checks = [at_most(name, float(num), 0.0) for name, num in rules.items()]
    name = "service that did not end well when it was asked to"
    value = float(found.exit_code != 0)
    checks.append(at_most(name, value, 0.0))
    name = "engines killed"
    checks.append(at_least(name, found.num_kills, 2))
    return checks


def _plan(options: argparse.Namespace) -> tuple[int, float]:
    """Return the number of requests, and the seconds between kills."""
    return (20_000, 16.0) if options.full else (2_000, 4.0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=float, default=150.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    options = parser.parse_args()
    num, interval_s = _plan(options)
    try:
        found = run(num, options.rate, interval_s, options.seed)
    except RunFailed as error:
        raise SystemExit(f"trace_audit.py: {error}") from None
    told = found.audit
    outcomes = sorted(found.answers.outcomes.items())
    print_table(
        "Outcomes as seen by the clients",
        ("kind", "ended", "requests"),
        [(kind, ended, num) for (kind, ended), num in outcomes],
    )
    print_table("Spans", ("name", "number"), sorted(told.names.items()))
    print_table(
        "In all",
        ("requests", "unheard", "records", "roots", "dropped", "spans", "worst gap ms", "kills"),
        [
            (told.num_requests, told.num_unreached, found.num_records, told.num_roots,
             found.num_dropped, told.num_spans, told.worst_gap_ns * 1e-6, found.num_kills)
        ],
    )  # fmt: skip
    checks = checks_of(found)
    print_checks(checks)
    document = {
        "audit": asdict(told),
        "outcomes": [[*key, num] for key, num in outcomes],
        "num_dropped": found.num_dropped,
        "num_records": found.num_records,
        "num_kills": found.num_kills,
    }
    write_json(options.json, document, checks)


if __name__ == "__main__":
    main()
