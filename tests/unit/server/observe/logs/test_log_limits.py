"""Log lines above the rate limit are omitted, and so is a known harmless error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from penstock.server.observe.logs.limits import (
    ALWAYS,
    BURST,
    LEFT_OUT,
    MAX_CALL_SITES,
    DisconnectErrorFilter,
    RateLimit,
)
from support.core import FakeClock

CORE = "grpc._cython.cygrpc"


class ExecuteBatchError(Exception):
    """Has the class name of gRPC's error."""


def _finish_handler_with_unary_response(error: Exception) -> None:
    raise error


def _handler_of_ours(error: Exception) -> None:
    raise error


def passes(name: str, error: Exception | None, *, is_sending: bool = True) -> bool:
    record = logging.LogRecord(name, logging.ERROR, "", 1, "raised in core", None, None)
    if error is not None:
        try:
            (_finish_handler_with_unary_response if is_sending else _handler_of_ours)(error)
        except type(error):
            record.exc_info = sys.exc_info()
    return DisconnectErrorFilter().filter(record)


def test_a_response_to_a_client_that_has_gone_is_not_logged() -> None:
    assert not passes(CORE, ExecuteBatchError())


@pytest.mark.parametrize(
    ("name", "error", "is_sending"),
    [
        (CORE, ExecuteBatchError(), False),
        (CORE, ValueError(), True),
        (CORE, None, True),
        ("penstock.server.rpc.handlers", ExecuteBatchError(), True),
    ],
)
def test_other_errors_are_logged(name: str, error: Exception | None, is_sending: bool) -> None:
    assert passes(name, error, is_sending=is_sending)


def record(line: int = 1, level: int = logging.ERROR, name: str = "a") -> logging.LogRecord:
    return logging.LogRecord(name, level, "f.py", line, "message", (), None)


def test_a_log_statement_has_a_burst_and_then_one_line_a_second() -> None:
    clock = FakeClock()
    limit = RateLimit(clock)
    assert sum(limit.filter(record()) for _ in range(1000)) == BURST
    clock.now_s += 3.0
    assert sum(limit.filter(record()) for _ in range(1000)) == 3
    clock.now_s += 1e6
    assert sum(limit.filter(record()) for _ in range(1000)) == BURST


def test_the_next_line_that_passes_states_how_many_did_not() -> None:
    clock = FakeClock()
    limit = RateLimit(clock)
    for _ in range(BURST + 5):
        limit.filter(record())
    clock.now_s += 2.0
    first, second = record(), record()
    assert limit.filter(first)
    assert limit.filter(second)
    assert getattr(first, LEFT_OUT) == 5
    assert not hasattr(second, LEFT_OUT)


@pytest.mark.parametrize("other", [{"line": 2}, {"name": "b"}])
def test_each_log_statement_has_its_own_rate_limit(other: dict[str, Any]) -> None:
    limit = RateLimit(FakeClock())
    for _ in range(BURST + 1):
        limit.filter(record())
    assert not limit.filter(record())
    assert limit.filter(record(**other))


def test_starts_and_ends_are_never_omitted() -> None:
    limit = RateLimit(FakeClock())
    for _ in range(BURST * 3):
        assert limit.filter(record(level=logging.CRITICAL))
        marked = record()
        for name, fact in ALWAYS.items():
            setattr(marked, name, fact)
        assert limit.filter(marked)


def test_the_number_of_rate_limited_log_statements_is_bounded() -> None:
    limit = RateLimit(FakeClock())
    for line in range(3 * MAX_CALL_SITES):
        assert limit.filter(record(line))
    assert len(limit._buckets) <= MAX_CALL_SITES  # pyright: ignore[reportPrivateUsage]
