"""Run a program through the scenarios: `python tests/conformance/driver.py --program "COMMAND"`.

Starts a separate service. `--address HOST:PORT` is appended to COMMAND; README.md next to this
file specifies its behaviour. Exit code 0 when nothing failed, 1 when something did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.runs import Result

TESTS = Path(__file__).resolve().parents[1]


def parsed(known: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a conformance program's scenarios.")
    parser.add_argument("--program", required=True, metavar="COMMAND", help="as for a shell")
    parser.add_argument(
        "--scenario",
        action="append",
        choices=known,
        metavar="NAME",
        help="this one, may be given again (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    return parser.parse_args()


def print_result(result: Result) -> None:
    why = f"  {result.why}" if result.why else ""
    print(f"{result.outcome:8}{result.scenario}{why}", flush=True)


def main() -> int:
    sys.path.insert(0, str(TESTS))
    from conformance.runs import results_of
    from conformance.scenarios import SCENARIOS

    known = tuple(scenario.name for scenario in SCENARIOS)
    options = parsed(known)
    command = shlex.split(options.program)
    results = asyncio.run(results_of(command, options.scenario or known, print_result))
    if options.json is not None:
        document = [asdict(result) for result in results]
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    num_passed = sum(result.outcome == "passed" for result in results)
    print(f"{num_passed} of {len(results)} passed")
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
