"""An exception is logged with its type, never with its message: the message may contain a prompt.
The tests start real processes, because the exception hooks (`sys.excepthook`,
`threading.excepthook`, `sys.unraisablehook`) are global to a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from penstock.server.observe.logs import LOG_FORMATS, LOG_LEVELS, set_log_level

CANARY = "canary-of-a-prompt"
PRELUDE = """
import logging, sys, threading
from penstock.server.observe.logs import configure_logging
configure_logging("front", "info", form=sys.argv[1])
CANARY = "-".join(("canary", "of", "a", "prompt"))
logger = logging.getLogger("here")
class UnprintableError:
    def __str__(self):
        raise ValueError(CANARY)
    def __del__(self):
        raise ValueError(CANARY)
def fail():
    raise ValueError(CANARY)
"""
ENDS = {
    "uncaught": ("fail()", 1, "uncaught exception: this process ends"),
    "in a thread": (
        "t = threading.Thread(target=fail, name='worker'); t.start(); t.join()",
        0,
        "uncaught exception: the thread worker ends",
    ),
    "finaliser": ("UnprintableError()", 0, "a finaliser failed"),
    "handled": ("""
try:
    fail()
except ValueError:
    logger.exception("failed")
""", 0, "failed"),
    "task": ("""
import asyncio, gc
async def main():
    async def hold(prompt):
        fail()
    asyncio.get_running_loop().create_task(hold(CANARY))
    asyncio.get_running_loop().call_soon(lambda prompt: fail(), CANARY)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
asyncio.run(main())
""", 0, "Task exception was never retrieved"),
}  # fmt: skip


def output_of(code: str, form: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, form],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("form", LOG_FORMATS)
@pytest.mark.parametrize("name", ENDS)
def test_no_message_of_an_exception_on_any_way_to_stderr(name: str, form: str) -> None:
    code, exit_code, message = ENDS[name]
    ended, lines = output_of(code, form)
    assert ended == exit_code
    assert not [line for line in lines if CANARY in line]
    (line,) = [line for line in lines if message in line]
    assert "ValueError" in line
    if form == "json":
        objects: list[dict[str, Any]] = [json.loads(line) for line in lines]
        assert {reported["process"] for reported in objects} == {"front"}


def test_a_line_that_cannot_be_written_does_not_show_its_arguments() -> None:
    code, lines = output_of("logger.error('%d', CANARY)", "text")
    assert code == 0
    assert [line for line in lines if line.endswith(" is lost: TypeError")]
    assert not [line for line in lines if CANARY in line]


def test_an_unknown_log_level_is_rejected() -> None:
    with pytest.raises(ValueError, match=f"level must be one of {', '.join(LOG_LEVELS)}"):
        set_log_level("loud")
