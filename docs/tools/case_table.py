"""Writes the tests of each case into the last column of the table in docs/survival-cases.md. The
tests of case NN are the functions `test_case_NN_...`.

Usage: `python docs/tools/case_table.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "docs" / "survival-cases.md"
NUM_CASES = 48
_TEST = re.compile(r"test_case_(\d\d)_(\w+)")
_ROW = re.compile(r"\| (\d+) \|(.*)\|(.*)\|(.*)\|")
_LINK = re.compile(r"\[`(\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")

Tests = Mapping[int, frozenset[tuple[str, str]]]
"""Case number -> (name, file) of each of its tests; files are relative to the repository."""


def written_tests() -> Tests:
    """Return the functions `test_case_NN_...` below tests/, by case number."""
    found: dict[int, set[tuple[str, str]]] = {}
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "test_case_" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                match = _TEST.fullmatch(node.name)
                if match:
                    place = path.relative_to(REPOSITORY).as_posix()
                    found.setdefault(int(match.group(1)), set()).add((node.name, place))
    return {number: frozenset(tests) for number, tests in found.items()}


def tests_of(cell: str) -> frozenset[tuple[str, str]]:
    """Return the (name, file) of each test listed in a cell of the last column."""
    return frozenset(_LINK.findall(cell))


def listed_tests() -> Tests:
    """Return the tests that the table lists, by case number. Raises ValueError for a duplicate case
    number.
    """
    listed: dict[int, frozenset[tuple[str, str]]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        match = _ROW.fullmatch(line)
        if match:
            number = int(match.group(1))
            if number in listed:
                raise ValueError(f"case {number} is in {TABLE.name} twice")
            listed[number] = tests_of(match.group(4))
    return listed


def cell_of(tests: frozenset[tuple[str, str]]) -> str:
    """Return a cell that lists the tests, sorted by name, with links to their files."""
    return "<br>".join(f"[`{name}`](../{place})" for name, place in sorted(tests))


def rewritten(text: str, tests: Tests) -> str:
    """Return the page `text`, in which the last column of the table lists `tests`."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        match = _ROW.fullmatch(line)
        if match:
            number, done, expected, _ = match.groups()
            cell = cell_of(tests.get(int(number), frozenset()))
            lines[index] = f"| {number} |{done}|{expected}| {cell} |"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(
        rewritten(TABLE.read_text(encoding="utf-8"), written_tests()), encoding="utf-8"
    )
