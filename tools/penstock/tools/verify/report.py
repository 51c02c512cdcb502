"""The report of `penstock verify`: a text table, and JSON to attach to a bug report.

The report contains no environment variables. Paths are replaced unless requested; in the JSON, host
names and peer addresses are replaced too.
"""

import json
import re
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.server.cli.installation import Installation
from penstock.server.cli.report import printable, table_lines
from penstock.tools.verify.check_result import CheckOutcome, CheckResult

FORMAT = 1
"""Version of the JSON format; incremented on incompatible changes."""

_PATH = re.compile(r"""(?<![\w/<])(?:~|\.{1,2})?/[^\s"',;:|)\]}]+""")
_PEER = re.compile(r"\b(?:ipv4|ipv6|dns|unix):[^\s;,]+[^\s;,:.]")
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedService:
    """A service started by `verify`. Durations are seconds.

    `arguments`: the arguments of `penstock serve`. `start_s`, `stop_s`: how long its start and stop
    took; `stop_s` is None if it exited by itself. `model_kind`: the detected kind of its model
    folder, "" if none was detected.
    """

    arguments: tuple[str, ...]
    start_s: float | None
    stop_s: float | None
    exit_code: int | None
    model_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of a verification. `model`: name, limits and features that the service publishes;
    empty if unknown. `served`: the service that was started for the verification; None if it was
    already running.
    """

    time_utc: str
    installation: Installation
    results: tuple[CheckResult, ...]
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    served: StartedService | None = None

    @property
    def is_passed(self) -> bool:
        """Whether at least one check passed and none failed."""
        outcomes = {result.outcome for result in self.results}
        return CheckOutcome.PASS in outcomes and CheckOutcome.FAIL not in outcomes


def report_json(report: Report, *, has_paths: bool, hidden: tuple[str, ...] = ()) -> str:
    """Format the whole report as JSON. `has_paths`: paths are included. `hidden`: host names that
    are replaced by "<host>".
    """

    def shown(text: str) -> str:
        return _without_names(_plain(text) if has_paths else _without_paths(text), hidden)

    served = report.served
    document = {
        "report": "penstock verify",
        "format": FORMAT,
        "is_passed": report.is_passed,
        "time_utc": report.time_utc,
        "versions": report.installation.versions,
        "machine": report.installation.machine,
        "service": None
        if served is None
        else {
            "arguments": [
                _without_names(shown_argument(one, has_paths=has_paths), hidden)
                for one in served.arguments
            ],
            "start_s": served.start_s,
            "stop_s": served.stop_s,
            "exit_code": served.exit_code,
            "model_kind": shown(served.model_kind),
        },
        "model": report.model,
        "checks": [
            {
                "name": result.name,
                "outcome": result.outcome.value,
                "reason": shown(result.reason),
                "duration_s": round(result.duration_s, 4),
            }
            for result in report.results
        ],
        "figures": report.figures,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def result_line(result: CheckResult, *, has_paths: bool) -> str:
    """Format the result of one check as one line."""
    shown = _plain if has_paths else _without_paths
    reason = shown(result.reason)
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + " ..."
    return f"{result.outcome.value}  {result.name:<16}{result.duration_s:7.2f} s  {reason}"


def heading_lines(installation: Installation) -> list[str]:
    """Return two lines, to be printed above the checks: the installed versions, and the machine's
    kernel, CPUs and GPUs.
    """
    versions = ", ".join(f"{name} {version}" for name, version in installation.versions.items())
    machine = installation.machine
    gpus = Counter(gpu["name"] for gpu in machine["gpus"])
    shown = ", ".join(f"{num} x {name}" for name, num in gpus.items()) or "no GPU found"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
    return [versions, f"{machine['kernel']}, {machine['num_cpus']} CPUs, {shown}{driver}{cuda}"]


def summary_lines(report: Report) -> list[str]:
    """Return the lines printed below the checks: the figures measured under load, and the number of
    checks by outcome.
    """
    lines: list[str] = []
    if report.figures:
        header = ("STREAMS", "TOKENS/s", "TTFT p50/p90/p99 ms", "ITL p50/p90/p99 ms")
        lines += ["", *table_lines([header, *map(_figure_row, report.figures.values())]), ""]
    counts = Counter(result.outcome for result in report.results)
    outcomes = [f"{counts[outcome]} {word}" for outcome, word in _WORDS if counts[outcome]]
    summary = "passed" if report.is_passed else "FAILED"
    return [*lines, f"{summary}: {', '.join(outcomes) or 'nothing was checked'}"]


_WORDS = (
    (CheckOutcome.PASS, "passed"),
    (CheckOutcome.FAIL, "failed"),
    (CheckOutcome.SKIP, "skipped"),
)


def _figure_row(figures: dict[str, Any]) -> tuple[str, ...]:
    def triple(name: str) -> str:
        return " / ".join(f"{figures[f'{name}_p{percent}_ms']:.1f}" for percent in (50, 90, 99))

    streams, speed = figures["num_streams"], figures["tokens_per_s"]
    return (str(streams), f"{speed:.0f}", triple("ttft"), triple("itl"))


def shown_argument(argument: str, *, has_paths: bool) -> str:
    """Return an argument of `serve`, with "<path>" for a possible path unless `has_paths`.

    In JSON arguments only the strings are replaced. In other arguments, a slash marks the whole
    argument as a path.
    """
    if has_paths or "/" not in argument:
        return _plain(argument)
    try:
        return json.dumps(_hidden(json.loads(argument)))
    except json.JSONDecodeError:
        flag, is_joined, _ = argument.partition("=")
        return f"{flag}=<path>" if is_joined and flag.startswith("--") else "<path>"


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _hidden(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_hidden(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return "<path>" if isinstance(value, str) and "/" in value else value


def _plain(text: str) -> str:
    return printable(text).replace("\n", " ")


def _without_paths(text: str) -> str:
    return _PATH.sub("<path>", _plain(text))


def hidden_names(address: str) -> tuple[str, ...]:
    """Return the names of this host and of the host in `address`, the longest first, except
    localhost and 127.0.0.1.
    """
    host = address.rpartition(":")[0] or address
    names = {socket.gethostname(), host.strip("[]").rpartition("/")[2]}
    return tuple(sorted(names - {"", "localhost", "127.0.0.1"}, key=len, reverse=True))


def _without_names(text: str, names: tuple[str, ...]) -> str:
    for name in names:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>", text)
    # The format of peer addresses in gRPC's messages.
    return _PEER.sub("<address>", text)
