"""Constraint checks take turns: each tenant has one check at a time."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator

import pytest

from penstock.executor.trtllm.constraint_check import ConstraintCheck, fault_of
from penstock.scheduler.request import Constraint, ConstraintKind


class Grammar:
    """Compiles nothing until released; records what was started, in order."""

    begun: list[str]
    may_end: threading.Event
    news: threading.Condition

    @classmethod
    def from_regex(cls, text: str) -> str:
        with cls.news:
            cls.begun.append(text)
            cls.news.notify_all()
        assert cls.may_end.wait(60)
        return 'root ::= "a"'


@pytest.fixture
async def check() -> AsyncIterator[ConstraintCheck]:
    Grammar.begun, Grammar.may_end = [], threading.Event()
    Grammar.news = threading.Condition()
    yield ConstraintCheck(functools.partial(fault_of, Grammar))
    Grammar.may_end.set()


def asked(check: ConstraintCheck, tenant: str, text: str) -> asyncio.Task[str]:
    form = Constraint(kind=ConstraintKind.REGEX, texts=(text,))
    return asyncio.create_task(check.fault(form, tenant))


async def begun(num: int) -> list[str]:
    def wait() -> bool:
        with Grammar.news:
            return Grammar.news.wait_for(lambda: len(Grammar.begun) >= num, 60)

    assert await asyncio.to_thread(wait)
    return list(Grammar.begun)


async def test_a_tenant_has_one_check_at_a_time(check: ConstraintCheck) -> None:
    flood = [asked(check, "a", f"a{index}") for index in range(20)]
    other = asked(check, "b", "b0")

    assert sorted(await begun(2)) == ["a0", "b0"]
    Grammar.may_end.set()
    assert await asyncio.gather(*flood, other) == [""] * 21


async def test_who_is_cancelled_while_waiting_gives_its_place_up(check: ConstraintCheck) -> None:
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
