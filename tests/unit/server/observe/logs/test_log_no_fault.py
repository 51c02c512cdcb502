"""A known harmless error line is suppressed, but no similar one."""

from __future__ import annotations

import logging
import sys

import pytest

from penstock.server.observe.logs.limits import NoFault

CORE = "grpc._cython.cygrpc"


class ExecuteBatchError(Exception):
    """Named like gRPC's error."""


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
    return NoFault().filter(record)


def test_an_answer_that_nobody_took_is_no_line() -> None:
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
def test_all_others_are(name: str, error: Exception | None, is_sending: bool) -> None:
    assert passes(name, error, is_sending=is_sending)
