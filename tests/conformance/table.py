"""Run the scenarios in every language available on this machine, and write docs/conformance.md.

Usage: `python tests/conformance/table.py`, with `--json FILE` for the results as data. Languages
without their tools are reported as not run. Exit code 1: a scenario failed, or a program could not
be built.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.runs import Result
    from conformance.sweep import LanguageReport

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "conformance.md"


def parsed(known: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run all conformance programs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as data")
    parser.add_argument("--no-page", action="store_true", help=f"do not write docs/{PAGE.name}")
    parser.add_argument(
        "--language",
        action="append",
        choices=known,
        metavar="NAME",
        help="this one alone, may be given again; writes no page",
    )
    return parser.parse_args()


def as_data(report: LanguageReport) -> dict[str, Any]:
    return {
        "language": report.language.name,
        "versions": report.versions,
        "num_passed": report.num_passed,
        "not_run": report.not_run,
        "is_well": report.is_well,
        "results": [
            {"scenario": result.scenario, "outcome": result.outcome, "why": result.why}
            for result in report.results
        ],
    }


def print_result(result: Result) -> None:
    if result.outcome != "passed":
        print(f"  {result.scenario}: {result.outcome}: {result.why}", flush=True)


def main() -> int:
    sys.path.insert(0, str(TESTS))
    from conformance.programs import LANGUAGES
    from conformance.sweep import NAMES, page_of, run_language

    options = parsed([language.name for language in LANGUAGES])
    reports: list[LanguageReport] = []
    for language in LANGUAGES:
        if options.language and language.name not in options.language:
            continue
        report = run_language(language, print_result)
        summary = (
            f"not run: {report.not_run}" if report.not_run else f"{report.num_passed}/{len(NAMES)}"
        )
        print(f"{language.name}: {summary}", flush=True)
        reports.append(report)
    if not options.no_page and not options.language:
        PAGE.write_text(page_of(reports), encoding="utf-8")
    if options.json is not None:
        data = {"num_scenarios": len(NAMES), "languages": [as_data(report) for report in reports]}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return int(not all(report.is_well for report in reports))


if __name__ == "__main__":
    sys.exit(main())
