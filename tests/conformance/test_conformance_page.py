"""Languages are found or told as missing; the page tells every outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from conformance import sweep
from conformance.programs import (
    LANGUAGES,
    PYTHON,
    REPOSITORY,
    RUNNABLE,
    Language,
    Library,
    NotBuilt,
)
from conformance.runs import Result
from conformance.scenarios import SCENARIOS
from conformance.sweep import NAMES, Told, page_of, run_language

PAGE = REPOSITORY / "docs" / "conformance.md"


def makefile(folder: Path, recipe: str) -> Language:
    """A language whose build is `recipe`."""
    (folder / "Makefile").write_text(f"program:\n\t{recipe}\n", encoding="utf-8")
    return Language(name="Ours", folder=str(folder))


def test_what_a_machine_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "Makefile").touch()
    language = Language(
        name="Ours",
        folder=str(tmp_path),
        tools=("no-such-compiler", "make"),
        libraries=(Library(package="libnone-dev", path="/nowhere/none.h"),),
        output="built",
    )

    assert language.why_not() == "needs no-such-compiler, libnone-dev"
    assert run_language(language).not_run == "needs no-such-compiler, libnone-dev"
    (tmp_path / "built").touch()
    assert language.why_not() == ""


def test_a_language_without_sources_is_told_as_such() -> None:
    language = Language(name="Ours", template="ours.yaml")

    assert language.why_not() == "stubs only, from ours.yaml"


def test_a_language_without_a_client_is_told_as_such() -> None:
    assert Language(name="Ours", folder="none").why_not() == "needs clients/none/Makefile"


def test_a_build_prints_the_command(tmp_path: Path) -> None:
    language = makefile(tmp_path, "@echo noise >&2; echo \"run 'a b' c\"")

    assert language.command() == ["run", "a b", "c"]


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("@echo no compiler >&2; exit 1", "no compiler"),
        ("@echo one; echo two", "ended with 0: two"),
        ("@true", "ended with 0"),
    ],
)
def test_a_build_that_fails_is_told(tmp_path: Path, recipe: str, why: str) -> None:
    language = makefile(tmp_path, recipe)

    with pytest.raises(NotBuilt, match=why):
        language.command()
    told = run_language(language)
    assert why in told.not_run
    assert not told.is_well


def test_a_fault_of_the_driver_does_not_lose_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Result(scenario=NAMES[0], outcome="passed")

    async def faulty(_: Sequence[str], __: Sequence[str], tell: Callable[[Result], None]) -> None:
        tell(first)
        raise KeyError("lost")

    monkeypatch.setattr(sweep, "results_of", faulty)
    told = run_language(makefile(tmp_path, "@echo run"))

    assert told.results == (
        first,
        Result(scenario="driver", outcome="failed", why="KeyError: 'lost'"),
    )
    assert not told.is_well
    page = page_of([told])
    assert f"| Ours | - | 1 of {len(NAMES)} |" in page
    assert f"| `{NAMES[1]}` | {SCENARIOS[1].holds} | not run |" in page
    assert "- Ours, `driver`: failed: KeyError: 'lost'" in page


def test_the_page_tells_every_outcome() -> None:
    results = [Result(scenario=name, outcome="passed") for name in NAMES]
    results[0] = Result(scenario=NAMES[0], outcome="failed", why="a | gap")
    results[1] = Result(scenario=NAMES[1], outcome="skipped", why="no library")
    ours = Told(language=PYTHON, versions="Python 3", results=tuple(results))
    other = Told(language=Language(name="Other"), not_run="needs make")

    page = page_of([ours, other])

    assert not ours.is_well
    assert f"| Python | Python 3 | {len(NAMES) - 2} of {len(NAMES)} |" in page
    assert "| Other | - | not run: needs make |" in page
    assert f"| `{NAMES[0]}` | {SCENARIOS[0].holds} | failed |" in page
    assert f"| `{NAMES[2]}` | {SCENARIOS[2].holds} | passed |" in page
    assert f"- Python, `{NAMES[0]}`: failed: a / gap" in page
    assert f"- Python, `{NAMES[1]}`: skipped: no library" in page


def test_the_page_in_the_documentation_is_of_these_scenarios_and_languages() -> None:
    page = PAGE.read_text(encoding="utf-8")

    for scenario in SCENARIOS:
        assert f"| `{scenario.name}` | {scenario.holds} |" in page
    for language in LANGUAGES:
        assert f"| {language.name} | " in page
    assert f"| {len(NAMES)} of {len(NAMES)} |" in page


@pytest.mark.parametrize("language", RUNNABLE, ids=[language.name for language in RUNNABLE])
def test_the_page_in_the_documentation_was_written_since_the_language_came(
    language: Language,
) -> None:
    (row,) = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| {language.name} | ")
    ]
    is_here = not language.folder or (language.path / "Makefile").is_file()

    assert is_here is ("/Makefile" not in row), row
