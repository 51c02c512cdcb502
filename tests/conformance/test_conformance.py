"""Every language's program passes every scenario; languages without their tools are skipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.programs import BUILD_S, RUNNABLE, Language
from conformance.runs import ANSWER_S, results_of
from conformance.scenarios import SCENARIOS
from conformance.sweep import NAMES

SPECIFICATION = Path(__file__).with_name("README.md")


def test_the_specification_has_every_scenario_in_order() -> None:
    scenarios = SPECIFICATION.read_text(encoding="utf-8").split("## The scenarios")[1]
    report = re.findall(r"^\| `(\w+)` \|", scenarios, re.MULTILINE)

    assert report == list(NAMES)
    assert len(SCENARIOS) == 20


@pytest.mark.timeout(BUILD_S + len(NAMES) * ANSWER_S)
@pytest.mark.parametrize("language", RUNNABLE, ids=[language.name for language in RUNNABLE])
async def test_every_scenario_passes(language: Language) -> None:
    if why := language.why_not():
        pytest.skip(f"{language.name} {why}")

    results = await results_of(language.command(), NAMES)

    assert [(each.scenario, each.outcome, each.why) for each in results] == [
        (name, "passed", "") for name in NAMES
    ]
