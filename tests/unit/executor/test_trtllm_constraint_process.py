"""The separate process that checks constraints, over a stand-in for xgrammar."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.executor.trtllm.constraint_check import (
    NO_OUTPUT,
    NOT_CHECKED,
    NOT_COMPILED,
    TOO_LARGE,
)
from penstock.executor.trtllm.constraint_process import CheckProcesses
from penstock.scheduler.request import Constraint, ConstraintKind

XGRAMMAR = """
import ctypes, os, sys
class Grammar:
    @classmethod
    def from_ebnf(cls, text):
        print("a library prints something")
        if text == "hold":
            ctypes.PyDLL(None).sleep(1000)  # with the lock of its interpreter, as xgrammar does
        if text == "die":
            os.abort()
        if text == "large":
            bytearray(4 << 30)
        return text
"""


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckProcesses]:
    (tmp_path / "xgrammar.py").write_text(XGRAMMAR, encoding="utf-8")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    made = CheckProcesses(check_s=0.3)
    yield made
    made.close()


def fault(checks: CheckProcesses, text: str) -> str:
    return checks.fault(Constraint(kind=ConstraintKind.GRAMMAR, texts=(text,)))


def test_a_constraint_that_takes_the_process_along_is_refused_and_others_are_checked(
    checks: CheckProcesses,
) -> None:
    assert fault(checks, 'root ::= "a"') == ""
    assert fault(checks, "hold") == TOO_LARGE
    assert fault(checks, "root ::= root") == NO_OUTPUT
    assert fault(checks, "die") == TOO_LARGE
    assert fault(checks, "large") == NOT_COMPILED
    assert fault(checks, 'root ::= "a"') == ""


def test_where_nothing_can_check_nothing_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xgrammar.py").write_text("raise ImportError", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checks = CheckProcesses()
    try:
        assert fault(checks, 'root ::= "a"') == NOT_CHECKED
    finally:
        checks.close()
