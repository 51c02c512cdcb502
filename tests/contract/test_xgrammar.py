"""Tests of the constraint check with the real xgrammar, in the oldest and the newest version that
engines use.

`make install` installs both without their dependencies, torch and transformers, which are already
installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contract import xgrammar_constraints
from contract.xgrammar_constraints import BROKEN, expected
from penstock.executor.trtllm.constraint_check import TOO_LARGE
from penstock.executor.trtllm.constraint_process import CheckProcesses
from penstock.executor.trtllm.error_texts import is_fatal, is_invalid_constraint
from penstock.scheduler.request import Constraint, ConstraintKind

VERSIONS = sorted(Path(sys.prefix, "xgrammar").glob("*"))

pytestmark = [
    pytest.mark.xgrammar,
    pytest.mark.skipif(not VERSIONS, reason="no xgrammar: see `make install`"),
]


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda path: path.name)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = os.pathsep.join((str(request.param), *sys.path))
    done = subprocess.run(
        [sys.executable, xgrammar_constraints.__file__],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=True,
        timeout=100,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_exactly_the_invalid_and_dead_end_constraints_are_rejected(
    found: dict[str, Any],
) -> None:
    assert found["faults"] == expected()


def test_an_engine_error_about_a_broken_constraint_is_the_requests_fault(
    found: dict[str, Any],
) -> None:
    assert len(found["texts"]) == len(BROKEN) == 28
    assert [text for text, form in found["texts"] if not is_invalid_constraint(text, form)] == []
    assert not any(is_fatal(text, form) for text, form in found["texts"])


def test_a_pattern_with_quadratic_compile_time_does_not_block_other_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pattern has 32 kB. The oldest version compiles it for minutes and holds the GIL
    meanwhile.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(VERSIONS[0]), *sys.path)))
    slow = Constraint(kind=ConstraintKind.REGEX, texts=("(a?)" * 8192,))
    quick = Constraint(kind=ConstraintKind.REGEX, texts=("a?",))
    checks = CheckProcesses(check_s=2.0)
    try:
        with ThreadPoolExecutor(1) as threads:
            checking = threads.submit(checks.fault, slow)
            assert checks.fault(quick) == ""
            assert checking.result() == TOO_LARGE
    finally:
        checks.close()
