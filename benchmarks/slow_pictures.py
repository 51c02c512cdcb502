"""Creates the pictures and figures of docs/why-is-it-slow.md from real runs.

Each case runs twice, first without and then with the settings that the page recommends, on
`penstock serve` together with Prometheus and `penstock top`. Pictures are written to docs/pictures;
figures from the clients, Prometheus and `penstock timeline` replace the text between the page's
marker comments.

    python benchmarks/slow_pictures.py [--only blocks,flood] [--keep DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import picture_timeline
from load import LoadRequest, Seen, open_loop, sending
from penstock.client import NO_RETRY, ChannelConfig, Client, PenstockError, SyncOperationsClient
from penstock.server.cli.top_state import TopState
from services import Service, service
from slow_cases import Case, cases
from slow_site import CaseResults, Prometheus, block, with_results
from usage import needing

with needing("top"):
    from picture_top import top_svg

DOCS = Path(__file__).resolve().parents[1] / "docs"
# One example of the output of `penstock timeline`, and one for an engine that died.
SUMMARISED = ("blocks", "killed")
PICTURES = DOCS / "pictures"
PAGE = DOCS / "why-is-it-slow.md"
_FOLDER = re.compile(r"/\S*/(?=penstock-flight-)")
_LOOK_EVERY_S = 0.25
_BEATS_S = 1.6
"""Seconds until Prometheus has the last state of the fronts, which report once per second;
Prometheus scrapes four times per second.
"""


@dataclass(slots=True, kw_only=True)
class Run:
    """The results of one run. `trace`: the file of `penstock timeline`; `summary`: its printed
    output."""

    answers: list[Seen] = field(default_factory=list[Seen])
    values: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    trace: dict[str, Any] = field(default_factory=dict[str, Any])
    summary: str = ""
    top: str = ""
    log: str = ""


class NarrowLine(ChannelConfig):
    """Channel options of a connection that behaves like a slow network: reads one kilobyte at a
    time.
    """

    __slots__ = ()

    def options(self, target: str = "") -> tuple[tuple[str, int | str], ...]:
        """See `ChannelConfig`."""
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        return (*super().options(target), *narrow)


class Load(threading.Thread):
    """Sends the requests of a case, in a thread."""

    def __init__(self, address: str, asks: Sequence[LoadRequest]) -> None:
        super().__init__(name="load")
        self._address, self._asks = address, asks
        self.answers: list[Seen] = []

    def run(self) -> None:
        self.answers = asyncio.run(self._drive())

    async def _drive(self) -> list[Seen]:
        async with (
            Client(self._address, retry=NO_RETRY) as client,
            # A slow reader uses a separate connection with a small receive buffer.
            Client(self._address, retry=NO_RETRY, channel=NarrowLine()) as narrow,
        ):
            usual, slow = (sending(each, deadline_s=60.0) for each in (client, narrow))

            async def send(ask: LoadRequest) -> Seen:
                return await (slow if ask.read_s else usual)(ask)

            return await open_loop(self._asks, send)


def run_case(case: Case, *, is_cured: bool, home: Path) -> Run:
    """Run a case once. Raises RunFailed."""
    options = case.cured_options if is_cured else case.all_options
    asks = case.cured_asks if is_cured and case.cured_asks else case.asks
    flights = home / "flights"
    found = Run()
    kept = ("--flight-folder", str(flights), "--drain-grace-s", "2")
    with service(
        *("--executor", "simulated"), *kept, *options, has_operations=True, has_metrics=True
    ) as there:
        prometheus = Prometheus(home / "prometheus", there.metrics)
        try:
            prometheus.until_scraped()
            begun_s = time.monotonic()
            load = Load(there.address, asks)
            load.start()
            _watch(case, there, found)
            load.join()
            time.sleep(_BEATS_S)
            window = f"[{time.monotonic() - begun_s:.0f}s]"
            for query in case.queries:
                found.values[query] = prometheus.ask(query.replace("[5m]", window))
        finally:
            prometheus.close()
        if case.kill_s is None:
            with SyncOperationsClient(there.operations) as operations:
                file = Path(operations.dump_flight_record())
        else:
            file = next(iter(sorted(flights.glob("*.bin"))))
        _take_flight(file, found, home)
        found.answers, found.log = load.answers, "".join(there.log)
    return found


def _watch(case: Case, there: Service, found: Run) -> None:
    """Capture `penstock top` at the case's time; kill the engine if the case requires it."""
    begun_s = time.monotonic()
    state = TopState("127.0.0.1:50052")
    is_killed = case.kill_s is None
    with SyncOperationsClient(there.operations) as operations:
        while time.monotonic() < begun_s + case.look_s:
            time.sleep(_LOOK_EVERY_S)
            if case.kill_s is not None and not is_killed:
                time.sleep(max(0.0, begun_s + case.kill_s - time.monotonic()))
                os.kill(there.pids("engine")[0], signal.SIGKILL)
                is_killed = True
            try:
                state.take(operations.get_stats(), operations.list_requests(max_requests=500))
            except PenstockError as error:
                state.miss(str(error))
        found.top = top_svg(state)


def _take_flight(file: Path, found: Run, home: Path) -> None:
    """Store the flight recording as `penstock timeline` renders it."""
    output = home / "timeline.json"
    command = (sys.executable, "-m", "penstock.tools", "timeline", file, "-o", output)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found.summary = "\n".join(done.stdout.splitlines()[:-1])
    found.trace = json.loads(output.read_text(encoding="utf-8"))


def draw(case: Case, first: Run, second: Run | None) -> dict[str, str]:
    """Return the pictures of a case, by file name."""
    timeline = picture_timeline.timeline_of(first.trace)
    pictures = {f"{case.name}-timeline.svg": picture_timeline.picture(timeline, case.view)}
    if case.has_top:
        pictures[f"{case.name}-top.svg"] = first.top
    if second is not None and case.has_timeline_after:
        view = dataclasses.replace(case.view, title=f"The same with {case.cured}")
        drawn = picture_timeline.picture(picture_timeline.timeline_of(second.trace), view)
        pictures[f"{case.name}-timeline-after.svg"] = drawn
    return pictures


def logged(log: str, words: Sequence[str]) -> str:
    """Return the log lines since the service was ready that contain any of these words; folders are
    removed from paths."""
    _, _, since = log.rpartition("penstock metrics on")
    lines = [line for line in since.splitlines() if any(word in line for word in words)]
    return _FOLDER.sub("", "\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="CASE,...", help="these cases (default: all)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep timelines and logs there")
    args = parser.parse_args(argv)
    wanted = None if args.only is None else args.only.split(",")
    PICTURES.mkdir(exist_ok=True)
    for case in cases():
        if wanted is not None and case.name not in wanted:
            continue
        print(f"{case.name} ...", flush=True)
        with tempfile.TemporaryDirectory() as home:
            folders = [Path(home) / name for name in ("before", "after")]
            for folder in folders:
                folder.mkdir()
            first = run_case(case, is_cured=False, home=folders[0])
            second = run_case(case, is_cured=True, home=folders[1]) if case.cured else None
        for name, text in draw(case, first, second).items():
            (PICTURES / name).write_text(text, encoding="utf-8")
            print(f"  {name}: {len(text) / 1e3:.0f} kB")
        runs = (first,) if second is None else (first, second)
        told = CaseResults(
            case=case,
            answers=[run.answers for run in runs],
            values=[run.values for run in runs],
            summary=first.summary if case.name in SUMMARISED else "",
            log=logged(first.log, case.logged),
        )
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_results(page, case.name, block(told)), encoding="utf-8")
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            for number, run in enumerate(runs):
                (args.keep / f"{case.name}-{number}.json").write_text(json.dumps(run.trace))
                (args.keep / f"{case.name}-{number}.txt").write_text(run.summary)
            (args.keep / f"{case.name}.log").write_text(first.log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
