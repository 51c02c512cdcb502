"""Runs all scenarios in all languages available on this machine, and generates docs/conformance.md.

The page does not depend on the date.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.programs import Language, NotBuilt
from conformance.runs import Result, results_of
from conformance.scenarios import SCENARIOS

NAMES = tuple(scenario.name for scenario in SCENARIOS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageReport:
    """The result for one language: its results by scenario, or in `not_run` why there are none."""

    language: Language
    versions: str = ""
    results: tuple[Result, ...] = ()
    not_run: str = ""

    @property
    def num_passed(self) -> int:
        return sum(result.outcome == "passed" for result in self.results)

    @property
    def is_well(self) -> bool:
        """True if no scenario failed and the program was built, or if the language's tools are not
        installed.
        """
        return not self.not_built and all(result.outcome != "failed" for result in self.results)

    @property
    def not_built(self) -> bool:
        """True if the program could not be built although its tools are installed."""
        return not self.results and not self.language.why_not()


def run_language(
    language: Language, on_result: Callable[[Result], None] = lambda _: None
) -> LanguageReport:
    """Build a language's program and run all scenarios on it.

    An error of the driver becomes a result named "driver", so that other languages still run.
    """
    if why := language.why_not():
        return LanguageReport(language=language, not_run=why)
    try:
        command = language.command()
    except NotBuilt as error:
        return LanguageReport(language=language, not_run=f"not built: {error}")
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        on_result(result)

    try:
        asyncio.run(results_of(command, NAMES, add))
    except Exception as error:  # after any error the other languages are run
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        add(Result(scenario="driver", outcome="failed", why=why))
    versions = language.installed_versions()
    return LanguageReport(language=language, versions=versions, results=tuple(results))


def page_of(reports: Sequence[LanguageReport]) -> str:
    return "\n".join([*_head(), *_languages(reports), *_scenarios(reports), *_failures(reports)])


def _head() -> list[str]:
    return [
        "# Conformance",
        "",
        "<!-- Written by tests/conformance/table.py: `make conformance`. -->",
        "",
        "One program for each language, built on that language's client, runs the same"
        f" {len(NAMES)} scenarios against a live service.",
        "The service is the real one: supervisor, two fronts and an engine, whose executor is the"
        " simulated one at 10 ms a step.",
        "[tests/conformance/README.md](../tests/conformance/README.md) lists what each scenario"
        " requests, and how to add a program in another language.",
        "",
    ]


def _languages(reports: Sequence[LanguageReport]) -> list[str]:
    rows = [
        f"| {report.language.name} | {report.versions or '-'} | {_summary(report)} |"
        for report in reports
    ]
    return [
        "## Languages",
        "",
        "| language | run with | passed |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _summary(report: LanguageReport) -> str:
    if report.not_run:
        return f"not run: {_in_cell(report.not_run)}"
    return f"{report.num_passed} of {len(NAMES)}"


def _scenarios(reports: Sequence[LanguageReport]) -> list[str]:
    run = [report for report in reports if report.results]
    header = "".join(f" {report.language.name} |" for report in run)
    lines = [
        "## Scenarios",
        "",
        f"| scenario | what must hold |{header}",
        "|---|---|" + "---|" * len(run),
    ]
    for scenario in SCENARIOS:
        cells = "".join(f" {_outcome(report, scenario.name)} |" for report in run)
        lines.append(f"| `{scenario.name}` | {scenario.holds} |{cells}")
    return [*lines, ""]


def _outcome(report: LanguageReport, name: str) -> str:
    outcomes = [result.outcome for result in report.results if result.scenario == name]
    return outcomes[0] if outcomes else "not run"


def _failures(reports: Sequence[LanguageReport]) -> list[str]:
    lines = [
        f"- {report.language.name}, `{result.scenario}`: {result.outcome}: {_in_cell(result.why)}"
        for report in reports
        for result in report.results
        if result.outcome != "passed"
    ]
    return ["## Not passed", "", *lines, ""] if lines else []


def _in_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
