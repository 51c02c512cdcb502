"""Measures a service under failures: crashes, hangs, cancels, malformed requests, overload and
abuse.

Sections (default: all): engine_kill, no_replay, hang, front_kill, drain, cancel, malformed,
rejects, abuse. The last two are separate benchmarks (overload.py, abuse.py), which this program
also runs.

    python benchmarks/survival.py [--quick] [--sections NAME,...] [--json FILE]

`--quick`: fewer rounds and smaller numbers; takes minutes instead of almost an hour.
survival_table.py creates the table in docs/figures.md from the JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import survival_kills
import survival_load
from report import Check, arguments, print_checks, progress, write_json
from services import RunFailed

_HERE = Path(__file__).resolve().parent
_SIBLING_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work. `num_kills`: number of kills by kind of model. `siblings`: options of the
    other benchmarks.
    """

    num_kills: dict[str, int]
    num_rounds: int
    num_cancels: int
    num_malformed: int
    siblings: tuple[str, ...]


QUICK = Size(
    num_kills={"simulated": 2, "demo": 1},
    num_rounds=2,
    num_cancels=10_000,
    num_malformed=10_000,
    siblings=(),
)
WHOLE = Size(
    num_kills={"simulated": 10, "demo": 10},
    num_rounds=10,
    num_cancels=100_000,
    num_malformed=100_000,
    siblings=("--full",),
)
Outcome = tuple[Any, list[Check]]


async def sibling(name: str, options: tuple[str, ...]) -> Outcome:
    """Run another benchmark; return its results from its JSON."""
    with tempfile.TemporaryDirectory(prefix="penstock-survival-") as folder:
        path = Path(folder) / "found.json"
        command = (sys.executable, str(_HERE / f"{name}.py"), "--json", str(path), *options)
        # A missed goal is reported by its check; only a run without a result is a failure.
        done = await asyncio.to_thread(
            subprocess.run, command, check=False, timeout=_SIBLING_S, env=dict(os.environ)
        )
        if not path.exists():
            raise RunFailed(f"{name}.py exited with {done.returncode} and without results")
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    fields = ("name", "value", "goal", "unit", "sense", "is_settled")
    checks = [Check(**{name: one[name] for name in fields}) for one in document["checks"]]
    return document["results"], checks


def sections(size: Size) -> dict[str, Callable[[], Coroutine[Any, Any, Outcome]]]:
    """Return every section by name, in the order in which they run."""
    return {
        "engine_kill": lambda: survival_kills.engine_kill(size.num_kills),
        "no_replay": lambda: survival_kills.no_replay(size.num_rounds),
        "hang": survival_kills.hang,
        "front_kill": survival_kills.front_kill,
        "drain": survival_kills.drain,
        "cancel": lambda: survival_load.cancel(size.num_cancels),
        "malformed": lambda: survival_load.malformed(size.num_malformed),
        "rejects": lambda: sibling("overload", size.siblings),
        "abuse": lambda: sibling("abuse", size.siblings),
    }


def _chosen(wanted: str | None, known: dict[str, Any]) -> list[str]:
    names = list(known) if wanted is None else wanted.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--sections: unknown sections: {', '.join(unknown)}")
    return names


def main() -> None:
    """Run the sections; the exit code is 1 if a goal was missed or a section could not run."""
    parser = arguments(__doc__)
    parser.add_argument("--sections", metavar="NAME,...", help="only these")
    options = parser.parse_args()
    known = sections(QUICK if options.quick else WHOLE)
    results: dict[str, Any] = {}
    checks: list[Check] = []
    failed: list[str] = []
    for name in _chosen(options.sections, known):
        begun_s = time.monotonic()
        try:
            found, told = asyncio.run(known[name]())
        except RunFailed as error:
            failed.append(name)
            progress(f"{name} could not be measured: {error}")
            continue
        results[name] = {"found": found, "checks": [check.name for check in told]}
        checks += told
        progress(f"{name}: {time.monotonic() - begun_s:.0f} s")
        # Keep the results so far if a later section fails.
        write_json(options.json, results, checks)
    print_checks(checks)
    if failed:
        print(f"\nnot measured: {', '.join(failed)}")
    sys.exit(bool(failed) or any(check.holds is False for check in checks))


if __name__ == "__main__":
    main()
