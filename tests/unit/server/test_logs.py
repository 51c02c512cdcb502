"""One event, one line."""

import logging
import os
import sys

import pytest

from penstock.server.logs import OneLineFormatter


def test_a_traceback_stays_in_its_line() -> None:
    try:
        int("first\nsecond")
    except ValueError:
        failure = sys.exc_info()
    else:
        pytest.fail("that is no number")
    record = logging.LogRecord(
        "a.b", logging.ERROR, "f.py", 1, "it %s", ("broke\r\nhere",), failure
    )
    record.created, record.msecs = 0.0, 7.0
    line = OneLineFormatter("engine").format(record)
    assert line.startswith(
        f"1970-01-01T00:00:00.007Z ERROR engine[{os.getpid()}] a.b: it broke\\r\\nhere | Traceback"
    )
    assert line.endswith("ValueError: invalid literal for int() with base 10: 'first\\nsecond'")
    assert "\n" not in line
