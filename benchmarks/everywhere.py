"""Measures Penstock in other languages, behind a gateway and on Ray Serve.

Sections (default: all): conformance, gateway, ray. Each is a separate benchmark (everywhere_*.py),
which documents its requirements. A section whose requirements are not installed is reported and
left out, and the run then counts as failed.

    python benchmarks/everywhere.py [--full] [--sections NAME,...] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import everywhere_gateway
import everywhere_ray
from report import (
    Check,
    RunFailed,
    arguments,
    at_least,
    print_checks,
    print_table,
    progress,
    write_json,
)

TABLE = Path(__file__).resolve().parents[1] / "tests" / "conformance" / "table.py"
LIMIT_S = 3600.0


def conformance() -> list[Check]:
    """Run the conformance tests of all languages and print the results; return one check per
    language available.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "conformance.json"
        # A non-zero exit code means a failure, which the figures also report.
        subprocess.run(
            [sys.executable, str(TABLE), "--no-page", "--json", str(file)],
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
        told = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
    num_scenarios, languages = int(told["num_scenarios"]), cast("list[Any]", told["languages"])
    rows = [(each["language"], each["num_passed"], each["not_run"]) for each in languages]
    print_table("Conformance", ("language", "passed", "not run"), rows)
    return [
        at_least(
            f"conformance, {each['language']}",
            float(each["num_passed"]),
            float(num_scenarios),
            f"of {num_scenarios} scenarios",
        )
        for each in languages
        if each["results"] or not each["is_well"]
    ]


SECTIONS: dict[str, Callable[[bool], list[Check]]] = {
    "conformance": lambda _: conformance(),
    "gateway": lambda is_full: everywhere_gateway.run(is_full=is_full),
    "ray": lambda is_full: everywhere_ray.run(is_full=is_full),
}


def main() -> int:
    """Run the requested sections; return 1 if one could not run."""
    parser = arguments(__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), metavar="NAME,...")
    args = parser.parse_args()
    names = args.sections.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    checks: list[Check] = []
    not_run: dict[str, str] = {}
    for name in names:
        progress(f"section {name}")
        try:
            checks += SECTIONS[name](args.full)
        except RunFailed as error:
            not_run[name] = str(error)
    print_checks(checks)
    for name, why in not_run.items():
        print(f"not run: {name}: {why}")
    write_json(args.json, {"not_run": not_run}, checks)
    return 1 if not_run else 0


if __name__ == "__main__":
    sys.exit(main())
