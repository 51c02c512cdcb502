"""Make the pictures and figures of docs/why-is-it-slow.md, from real runs.

Each case runs twice, as it was and with what the page advises, on `penstock serve` with a
collector, Prometheus, Chromium and `penstock top` around it. Pictures go to docs/pictures; what the
clients, Prometheus and `penstock timeline` said replaces what stands between the page's marks.

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

import picture_browser
import picture_timeline
from penstock.client import PenstockError, SyncOperationsClient
from penstock.server.cli.top_view import Board
from picture_browser import Page
from picture_trace import SeenSpan, waterfall
from slow_cases import Case, cases
from slow_load import Answer, Ask, drive
from slow_page import Told, write_told
from slow_site import Site, site
from usage import needing

with needing("top"):
    from picture_top import top_svg

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = DOCS / "pictures"
PAGE = DOCS / "why-is-it-slow.md"
_FOLDER = re.compile(r"/\S*/(?=penstock-flight-)")
_LOOK_EVERY_S = 0.25
_BEATS_S = 1.6
"""Fronts tell their state once a second, and it is scraped four times."""
_PAGE_SIZE, _SHOWN = (1180, 1000), 804


@dataclass(slots=True, kw_only=True)
class Run:
    """What was seen of one run. `trace`: the file of `penstock timeline`, `summary` its words."""

    answers: list[Answer] = field(default_factory=list[Answer])
    values: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    spans: list[SeenSpan] = field(default_factory=list[SeenSpan])
    trace: dict[str, Any] = field(default_factory=dict[str, Any])
    summary: str = ""
    top: str = ""
    shot: bytes = b""
    log: str = ""


class Load(threading.Thread):
    """Sends the requests of a case, beside whoever looks."""

    def __init__(self, address: str, asks: Sequence[Ask]) -> None:
        super().__init__(name="load")
        self._address, self._asks = address, asks
        self.answers: list[Answer] = []

    def run(self) -> None:
        self.answers = asyncio.run(drive(self._address, self._asks))


def run_case(case: Case, *, is_cured: bool, home: Path) -> Run:
    """One run of a case. Raises RunFailed."""
    options = case.cured_options if is_cured else case.all_options
    asks = case.cured_asks if is_cured and case.cured_asks else case.asks
    found = Run()
    with site(options, home) as there:
        begun_s = time.monotonic()
        load = Load(f"127.0.0.1:{there.port}", asks)
        if case.has_page and not is_cured:
            width, height = _PAGE_SIZE
            url = f"http://127.0.0.1:{there.metrics_port}/"
            with picture_browser.opened(url, width=width, height=height) as page:
                page.until("document.body.dataset.connection == 'live'")
                begun_s = time.monotonic()
                load.start()
                _watch(case, there, found, page)
        else:
            load.start()
            _watch(case, there, found, None)
        load.join()
        time.sleep(_BEATS_S)
        window = f"[{time.monotonic() - begun_s:.0f}s]"
        for query in case.queries:
            found.values[query] = there.prometheus.ask(query.replace("[5m]", window))
        _take_flight(there, found, left_by_dead=case.kill_s is not None, home=home)
        there.end()
        found.answers, found.spans = load.answers, there.collector.spans()
        found.log = there.log.read_text(encoding="utf-8")
    return found


def _watch(case: Case, there: Site, found: Run, page: Page | None) -> None:
    """Look on as an operator does, until it is time for a picture; kill what is to be killed."""
    begun_s = time.monotonic()
    address = f"127.0.0.1:{there.operations_port}"
    board = Board(address.replace(str(there.operations_port), "50052"))
    is_killed = case.kill_s is None
    with SyncOperationsClient(address) as operations:
        while time.monotonic() < begun_s + case.look_s:
            time.sleep(_LOOK_EVERY_S)
            if case.kill_s is not None and not is_killed:
                time.sleep(max(0.0, begun_s + case.kill_s - time.monotonic()))
                os.kill(there.engine_pid(), signal.SIGKILL)
                is_killed = True
            _look(operations, board)
        found.top = top_svg(board)
    if page is not None:
        found.shot = page.screenshot(height=_SHOWN)


def _look(operations: SyncOperationsClient, board: Board) -> None:
    try:
        board.take(operations.get_stats(), operations.list_requests(max_requests=500))
    except PenstockError as error:
        board.miss(str(error))


def _take_flight(there: Site, found: Run, *, left_by_dead: bool, home: Path) -> None:
    """The flight recording, as the command line shows it."""
    if left_by_dead:
        file = next(iter(sorted(there.flights.glob("*.bin"))))
    else:
        with SyncOperationsClient(f"127.0.0.1:{there.operations_port}") as operations:
            file = Path(operations.dump_flight_record())
    output = home / "timeline.json"
    command = (sys.executable, "-m", "penstock.tools", "timeline", file, "-o", output)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found.summary = "\n".join(done.stdout.splitlines()[:-1])
    found.trace = json.loads(output.read_text(encoding="utf-8"))


def draw(case: Case, first: Run, second: Run | None) -> dict[str, bytes]:
    """The pictures of a case, by file name."""
    pictures: dict[str, str] = {}
    timeline = picture_timeline.timeline_of(first.trace)
    pictures[f"{case.name}-timeline.svg"] = picture_timeline.picture(timeline, case.view)
    title = f"{', '.join(case.traced)} as traced"
    pictures[f"{case.name}-trace.svg"] = waterfall(first.spans, case.traced, title)
    if case.has_top:
        pictures[f"{case.name}-top.svg"] = first.top
    if second is not None and case.traced_after:
        title = f"The same with {case.cured}"
        drawn = waterfall(second.spans, case.traced_after, title)
        pictures[f"{case.name}-trace-after.svg"] = drawn
    if second is not None and case.has_timeline_after:
        view = dataclasses.replace(case.view, title=f"The same with {case.cured}")
        drawn = picture_timeline.picture(picture_timeline.timeline_of(second.trace), view)
        pictures[f"{case.name}-timeline-after.svg"] = drawn
    encoded = {name: text.encode() for name, text in pictures.items()}
    if first.shot:
        encoded[f"{case.name}-page.png"] = first.shot
    return encoded


def logged(log: str, words: Sequence[str]) -> str:
    """The lines with any of these words, of what came since it was ready; without folders."""
    _, _, since = log.rpartition("penstock metrics on")
    lines = [line for line in since.splitlines() if any(word in line for word in words)]
    return _FOLDER.sub("", "\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
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
        for name, data in draw(case, first, second).items():
            (PICTURES / name).write_bytes(data)
            print(f"  {name}: {len(data) / 1e3:.0f} kB")
        runs = (first,) if second is None else (first, second)
        told = Told(
            case=case,
            answers=[run.answers for run in runs],
            values=[run.values for run in runs],
            summary=first.summary,
            log=logged(first.log, case.logged),
        )
        write_told(PAGE, told)
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            for number, run in enumerate(runs):
                (args.keep / f"{case.name}-{number}.json").write_text(json.dumps(run.trace))
                (args.keep / f"{case.name}-{number}.txt").write_text(run.summary)
            (args.keep / f"{case.name}.log").write_text(first.log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
