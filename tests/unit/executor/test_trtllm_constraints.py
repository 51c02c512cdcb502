"""How the TensorRT-LLM executor checks constraints: the regular expression for a choice, the limit
of one check at a time per tenant, and the processes that run the checks.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.executor.trtllm.constraint_check import (
    NO_OUTPUT,
    NOT_CHECKED,
    NOT_COMPILED,
    TOO_LARGE,
    ConstraintCheck,
    choice_regex,
    fault_of,
)
from penstock.executor.trtllm.constraint_process import CheckProcesses
from penstock.scheduler.request import Constraint, ConstraintKind

METACHARACTERS = "\\^$.|?*+()[]{}"
NASTY = st.text(alphabet=METACHARACTERS + "ab\"'/-#& \n\r\té😀,0\u2028", min_size=1, max_size=8)


@given(st.lists(NASTY, min_size=1, max_size=6), NASTY)
def test_a_choice_regex_matches_exactly_the_choices(texts: list[str], other: str) -> None:
    pattern = re.compile(choice_regex(texts))
    assert all(pattern.fullmatch(text) for text in texts)
    assert (pattern.fullmatch(other) is not None) is (other in texts)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('say "yes"', 'say "yes"'),
        ("it's", "it's"),
        ("a\\b", "a\\\\b"),
        ("two\nlines", "two\nlines"),
        ("1-2 / 3 # &~<>", "1-2 / 3 # &~<>"),
        ("ünï😀", "ünï😀"),
        ("{x}[y](z)", r"\{x\}\[y\]\(z\)"),
        ("^a.b*c+d?e$|f", r"\^a\.b\*c\+d\?e\$\|f"),
    ],
)
def test_only_metacharacters_get_a_backslash(text: str, pattern: str) -> None:
    """Rust's regex dialect rejects a backslash before a letter or a space; in ECMAScript's dialect,
    a backslash gives some letters another meaning.
    """
    assert choice_regex([text]) == pattern


def test_a_choice_regex_has_no_groups() -> None:
    assert choice_regex(["yes", "no", "(?:)"]) == r"yes|no|\(\?:\)"


class Grammar:
    """A stand-in for a grammar compiler, which blocks until it is released. `begun`: the regular
    expressions whose compilation began, in order.
    """

    begun: list[str]
    may_end: threading.Event
    updates: threading.Condition

    @classmethod
    def from_regex(cls, text: str) -> str:
        with cls.updates:
            cls.begun.append(text)
            cls.updates.notify_all()
        assert cls.may_end.wait(60)
        return 'root ::= "a"'


@pytest.fixture
async def check() -> AsyncIterator[ConstraintCheck]:
    Grammar.begun, Grammar.may_end = [], threading.Event()
    Grammar.updates = threading.Condition()
    yield ConstraintCheck(functools.partial(fault_of, Grammar))
    Grammar.may_end.set()


def asked(check: ConstraintCheck, tenant: str, text: str) -> asyncio.Task[str]:
    form = Constraint(kind=ConstraintKind.REGEX, texts=(text,))
    return asyncio.create_task(check.fault(form, tenant))


async def begun(num: int) -> list[str]:
    def wait() -> bool:
        with Grammar.updates:
            return Grammar.updates.wait_for(lambda: len(Grammar.begun) >= num, 60)

    assert await asyncio.to_thread(wait)
    return list(Grammar.begun)


async def test_a_tenant_has_one_check_at_a_time(check: ConstraintCheck) -> None:
    flood = [asked(check, "a", f"a{index}") for index in range(20)]
    other = asked(check, "b", "b0")

    assert sorted(await begun(2)) == ["a0", "b0"]
    Grammar.may_end.set()
    assert await asyncio.gather(*flood, other) == [""] * 21


async def test_a_request_cancelled_while_waiting_gives_its_place_up(check: ConstraintCheck) -> None:
    first = asked(check, "a", "a0")
    await begun(1)
    waiting = asked(check, "a", "a1")
    last = asked(check, "a", "a2")
    await asyncio.sleep(0)
    waiting.cancel()
    Grammar.may_end.set()

    assert list(await asyncio.gather(first, last)) == ["", ""]
    assert Grammar.begun == ["a0", "a2"]


async def test_the_place_of_a_cancelled_check_is_free_when_its_thread_is_done(
    check: ConstraintCheck,
) -> None:
    first = asked(check, "a", "a0")
    await begun(1)
    first.cancel()
    second = asked(check, "a", "a1")
    await asyncio.sleep(0)
    assert Grammar.begun == ["a0"]
    Grammar.may_end.set()

    assert await second == ""


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


def test_a_constraint_that_kills_its_checker_is_rejected_and_others_are_checked(
    checks: CheckProcesses,
) -> None:
    assert fault(checks, 'root ::= "a"') == ""
    assert fault(checks, "hold") == TOO_LARGE
    assert fault(checks, "root ::= root") == NO_OUTPUT
    assert fault(checks, "die") == TOO_LARGE
    assert fault(checks, "large") == NOT_COMPILED
    assert fault(checks, 'root ::= "a"') == ""


def test_constraints_are_rejected_if_the_checker_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xgrammar.py").write_text("raise ImportError", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checks = CheckProcesses()
    try:
        assert fault(checks, 'root ::= "a"') == NOT_CHECKED
    finally:
        checks.close()
