"""Collects the figures of docs/why-is-it-slow.md from Prometheus and from the clients.

Runs a Prometheus process, and formats the figures as text between marker comments of the page.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import shutil
import statistics
import subprocess
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load import RequestOutcome
from picture_svg import seconds
from report import RunFailed
from services import TIMEOUT_S, free_port
from slow_cases import Case

SUMMARISED = ("blocks", "killed")
"""Cases whose section contains the output of `penstock timeline`: one example, and an engine that
died.
"""
_FOLDER = re.compile(r"/\S*/(?=penstock-flight-)")
MARK, MARK_END = "<!-- run: {} -->", "<!-- end of run -->"
_POLL_S = 0.1
_OF_TARGET = ("__name__", "instance", "job", "model")
_NOTHING = 5e-4


class Prometheus:
    """A Prometheus process that scrapes `target` (HOST:PORT) four times per second. The constructor
    raises RunFailed if Prometheus is not installed.
    """

    def __init__(self, home: Path, target: str) -> None:
        executable = shutil.which("prometheus")
        if executable is None:
            raise RunFailed("Prometheus is not installed")
        home.mkdir()
        self._port = free_port()
        job = {"job_name": "penstock", "static_configs": [{"targets": [target]}]}
        every = {"scrape_interval": "250ms", "scrape_timeout": "250ms"}
        # JSON is YAML.
        config = json.dumps({"global": every, "scrape_configs": [job]})
        (home / "prometheus.yaml").write_text(config)
        self._process = subprocess.Popen(
            (
                *(executable, f"--config.file={home / 'prometheus.yaml'}", "--log.level=error"),
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            )
        )

    def query(self, query: str) -> dict[str, float]:
        """Return the current values of a PromQL query by their label values, joined with spaces;
        empty without data. Raises RunFailed for an invalid query.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            words = urllib.parse.urlencode({"query": query})
            connection.request("GET", f"/api/v1/query?{words}")
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if answer.get("status") != "success":
            raise RunFailed(f"{query}: {answer.get('error')}")
        data = answer["data"]
        if data["resultType"] == "scalar":
            return {"": float(data["result"][1])}
        return {
            " ".join(
                text for name, text in sorted(each["metric"].items()) if name not in _OF_TARGET
            ): float(each["value"][1])
            for each in data["result"]
        }

    def wait_until_scraped(self) -> None:
        """Wait for the first scrape. Raises RunFailed if there is none within a minute."""
        give_up_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(ConnectionError, json.JSONDecodeError):
                if 1.0 in self.query("up").values():
                    return
            time.sleep(_POLL_S)
        raise RunFailed("Prometheus has scraped nothing")

    def close(self) -> None:
        """Terminate the process and wait for its end."""
        self._process.terminate()
        self._process.wait(TIMEOUT_S)


@dataclass(slots=True, kw_only=True)
class Run:
    """The results of one run.

    `values`: the results of the PromQL queries, by query, then by labels. `trace` and `summary`:
    the file that `penstock timeline` writes, and the text that it prints. `top`: the picture of
    `penstock top`, as SVG. `log`: the log of the service.
    """

    answers: list[RequestOutcome] = field(default_factory=list[RequestOutcome])
    values: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    trace: dict[str, Any] = field(default_factory=dict[str, Any])
    summary: str = ""
    top: str = ""
    log: str = ""


def block(case: Case, runs: Sequence[Run]) -> str:
    """Return the results of a case's runs, in order, as Markdown."""
    names = ["before", *([f"with {case.second_name}"] if len(runs) > 1 else [])]
    lines = [f"| figure | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for group in case.groups:
        cells = [figures_of(run.answers, group) for run in runs]
        lines.append(f"| clients `{group}*` | {' | '.join(cells)} |")
    for query, unit in case.queries.items():
        cells = [values_text(run.values[query], unit) for run in runs]
        lines.append(f"| `{query.replace('|', chr(92) + '|')}` | {' | '.join(cells)} |")
    if log := log_lines(runs[0].log, case.log_words):
        lines += ["", "```", *log, "```"]
    if case.name in SUMMARISED:
        lines += ["", "```", *shortened(runs[0].summary), "```"]
    return "\n".join(lines)


def log_lines(log: str, words: Sequence[str]) -> list[str]:
    """Return the log lines since the service was ready that contain any of these words; paths of
    flight records are shortened to file names."""
    _, _, since = log.rpartition("penstock metrics on")
    lines = [line for line in since.splitlines() if any(word in line for word in words)]
    return [_FOLDER.sub("", line) for line in lines]


def shortened(summary: str) -> list[str]:
    """Return the lines of the summary of `penstock timeline`, without the engine's name, and with
    only the longest wait.
    """
    waits = [line for line in summary.splitlines() if line.startswith("waited ")]
    return [
        line
        for line in summary.splitlines()
        if not line.startswith("engine ") and line not in waits[1:]
    ]


def figures_of(answers: Sequence[RequestOutcome], prefix: str) -> str:
    """Format TTFT, longest gap between tokens and total time, each as median (worst), of the
    requests whose names have this prefix.

    Appends the number of errors by reason, if any.
    """
    its = [each for each in answers if each.name.startswith(prefix)]
    ends = [each.end for each in its]
    spreads = (
        _spread([each.ttft_s for each in its if each.ttft_s is not None]),
        _spread([max(each.gaps_s) for each in its if len(each.messages) > 1]),
        _spread([each.total_s for each in its]),
    )
    failed = [f"{ends.count(end)} {end}" for end in sorted({*ends} - {"OK"})]
    return "; ".join((*spreads, *failed))


def values_text(values: Mapping[str, float], unit: str) -> str:
    """Format a Prometheus result as a table cell; if there are several values, omit those near
    zero.
    """
    results = {
        labels: value for labels, value in values.items() if len(values) == 1 or value > _NOTHING
    }
    cells = [f"{labels} {_number(value, unit)}".strip() for labels, value in results.items()]
    return ", ".join(cells) or "0"


def with_results(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the marker comments of `name`. Raises ValueError if they
    are missing.
    """
    mark = MARK.format(name)
    before, found, rest = page.partition(mark)
    _, end, after = rest.partition(MARK_END)
    if not found or not end:
        raise ValueError(f"the page lacks {mark} or {MARK_END} after it")
    return f"{before}{mark}\n\n{text}\n\n{MARK_END}{after}"


def _spread(values_s: Sequence[float]) -> str:
    if not values_s:
        return "-"
    if len(values_s) == 1:
        return seconds(values_s[0])
    return f"{seconds(statistics.median(values_s))} ({seconds(max(values_s))})"


def _number(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "s":
        return seconds(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
