"""Creates the pictures and figures of docs/why-is-it-slow.md from real runs.

Each case runs on `penstock serve` together with Prometheus and `penstock top`. Most cases run a
second time, with the remedy that the page recommends. Pictures are written to
docs/pictures; figures from the clients, Prometheus and `penstock timeline` replace the text between
the page's marker comments.

    python docs/tools/slow_pictures.py [--only CASE]...
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

# The services and the load are those of the benchmarks.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import picture_timeline
from load import LoadRequest, RequestOutcome, open_loop, sending
from penstock.client import NO_RETRY, ChannelConfig, Client, PenstockError, SyncOperationsClient
from penstock.server.cli.top_state import TopState
from services import Service, service
from slow_cases import Case, cases
from slow_site import Prometheus, Run, block, with_results
from usage import needing

with needing("top"):
    from picture_top import top_svg

DOCS = Path(__file__).resolve().parents[1]
PICTURES = DOCS / "pictures"
PAGE = DOCS / "why-is-it-slow.md"
_POLL_S = 0.25
_PAUSE_S = 1.6
"""Seconds until Prometheus has the last state of the fronts, which report once per second;
Prometheus scrapes four times per second.
"""


class SlowReaderChannel(ChannelConfig):
    """Channel options of a slow reader: a fixed receive window of one kilobyte per stream."""

    __slots__ = ()

    def options(self, target: str = "") -> tuple[tuple[str, int | str], ...]:
        """Return the options of `ChannelConfig`, and the options of a slow reader."""
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        return (*super().options(target), *narrow)


class Load(threading.Thread):
    """Sends the requests of a case, in a thread."""

    def __init__(self, address: str, requests: Sequence[LoadRequest]) -> None:
        super().__init__(name="load")
        self._address, self._requests = address, requests
        self.answers: list[RequestOutcome] = []

    def run(self) -> None:
        """Send the requests and store their results."""
        self.answers = asyncio.run(self._drive())

    async def _drive(self) -> list[RequestOutcome]:
        async with (
            Client(self._address, retry=NO_RETRY) as client,
            # A slow reader uses a separate connection with a small receive buffer.
            Client(self._address, retry=NO_RETRY, channel=SlowReaderChannel()) as narrow,
        ):
            usual, slow = (sending(each, deadline_s=60.0) for each in (client, narrow))

            async def send(request: LoadRequest) -> RequestOutcome:
                return await (slow if request.read_s else usual)(request)

            return await open_loop(self._requests, send)


def run_case(case: Case, *, is_second: bool, home: Path) -> Run:
    """Run a case once; return the results. Raises RunFailed if the service or Prometheus does not
    start, or if a query fails.
    """
    options = case.second_options if is_second else case.first_options
    requests = case.second_requests if is_second and case.second_requests else case.requests
    flights = home / "flights"
    found = Run()
    kept = ("--flight-folder", str(flights), "--drain-timeout-s", "2")
    with service(
        *("--executor", "simulated"), *kept, *options, has_operations=True, has_metrics=True
    ) as there:
        prometheus = Prometheus(home / "prometheus", there.metrics)
        try:
            prometheus.wait_until_scraped()
            begun_s = time.monotonic()
            load = Load(there.address, requests)
            load.start()
            _watch(case, there, found)
            load.join()
            time.sleep(_PAUSE_S)
            window = f"[{time.monotonic() - begun_s:.0f}s]"
            for query in case.queries:
                found.values[query] = prometheus.query(query.replace("[5m]", window))
        finally:
            prometheus.close()
        if case.kill_s is None:
            with SyncOperationsClient(there.operations) as operations:
                file = Path(operations.dump_flight_record())
        else:
            file = next(iter(sorted(flights.glob("*.bin"))))
        _read_flight_record(file, found, home)
        found.answers, found.log = load.answers, "".join(there.log)
    return found


def _watch(case: Case, there: Service, found: Run) -> None:
    """Capture `penstock top` at `case.top_s`; kill the engine at `case.kill_s`, if that is set."""
    begun_s = time.monotonic()
    state = TopState("127.0.0.1:50052")
    is_killed = case.kill_s is None
    with SyncOperationsClient(there.operations) as operations:
        while time.monotonic() < begun_s + case.top_s:
            time.sleep(_POLL_S)
            if case.kill_s is not None and not is_killed:
                time.sleep(max(0.0, begun_s + case.kill_s - time.monotonic()))
                os.kill(there.pids("engine")[0], signal.SIGKILL)
                is_killed = True
            try:
                state.update(operations.get_stats(), operations.list_requests(max_requests=500))
            except PenstockError as error:
                state.record_failure(str(error))
        found.top = top_svg(state)


def _read_flight_record(file: Path, found: Run, home: Path) -> None:
    """Store the trace and the summary that `penstock timeline` creates from a flight record."""
    output = home / "timeline.json"
    command = (sys.executable, "-m", "penstock.tools", "timeline", file, "-o", output)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found.summary = "\n".join(done.stdout.splitlines()[:-1])
    found.trace = json.loads(output.read_text(encoding="utf-8"))


def draw(case: Case, runs: Sequence[Run]) -> dict[str, str]:
    """Return the pictures of a case as SVG, by file name."""
    timeline = picture_timeline.timeline_of(runs[0].trace)
    pictures = {f"{case.name}-timeline.svg": picture_timeline.picture(timeline, case.view)}
    if case.has_top:
        pictures[f"{case.name}-top.svg"] = runs[0].top
    if case.has_timeline_after:
        view = dataclasses.replace(case.view, title=f"The same with {case.second_name}")
        drawn = picture_timeline.picture(picture_timeline.timeline_of(runs[1].trace), view)
        pictures[f"{case.name}-timeline-after.svg"] = drawn
    return pictures


def main() -> None:
    """Run the cases; write their pictures and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in cases()]
    parser.add_argument("--only", action="append", choices=names, help="only this case; repeatable")
    args = parser.parse_args()
    for case in cases():
        if args.only and case.name not in args.only:
            continue
        print(f"{case.name} ...", flush=True)
        runs: list[Run] = []
        for is_second in (False, True) if case.second_name else (False,):
            with tempfile.TemporaryDirectory() as home:
                runs.append(run_case(case, is_second=is_second, home=Path(home)))
        for name, text in draw(case, runs).items():
            (PICTURES / name).write_text(text, encoding="utf-8")
            print(f"  {name}: {len(text) / 1e3:.0f} kB")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_results(page, case.name, block(case, runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
