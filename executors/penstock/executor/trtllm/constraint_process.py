"""Processes that check constraints, so that a constraint cannot block the process that runs the
engine.

xgrammar holds the GIL while it compiles, and needs time and memory that depend on the constraint;
both are limited here. A process that takes too long is killed; in one that allocates too much
memory, the check fails or the process dies. This module run as a program (`python -m`) is such a
process: it reads each `Constraint` from stdin and writes the error found, or an empty string, to
stdout, one line of JSON each. The first line that it writes is `_READY`.
"""

import contextlib
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from penstock.executor.trtllm.constraint_check import (
    NOT_CHECKED,
    TOO_LARGE,
    fault_of,
    installed_grammar,
)
from penstock.scheduler.request import Constraint

logger = logging.getLogger(__name__)

CHECK_S: Final = 10.0
START_S: Final = 120.0
"""Time limits in seconds: CHECK_S for a check, START_S for the start of a process, which loads
xgrammar and torch.
"""
_CHECK_BYTES: Final = 2 << 30
"""Address space that a process may allocate beyond the amount that it uses when it is ready."""
_READY: Final = "ready"


class CheckProcesses:
    """A pool of processes that check constraints. A process runs one check at a time; if all are
    busy, another is started. Methods may be called on any thread.
    """

    def __init__(self, check_s: float = CHECK_S) -> None:
        """Start the first process, because its start takes longer than a check. `check_s`: the time
        limit of a check, seconds.
        """
        self._check_s = check_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle = [_Process()]

    def fault(self, constraint: Constraint) -> str:
        """Return why a constraint is rejected, "" if it is accepted; TOO_LARGE or NOT_CHECKED if
        the check did not complete. Blocks.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process()
        is_kept = False
        try:
            answer = process.ask(constraint, self._check_s)
            is_kept = answer not in (None, NOT_CHECKED)
        finally:
            with self._lock:
                is_kept = is_kept and not self._is_closed
                if is_kept:
                    self._idle.append(process)
            if not is_kept:
                process.end()
        return TOO_LARGE if answer is None else answer

    def close(self) -> None:
        """Kill the idle processes; each busy one is killed after its check."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()


class _Process:
    """A process that checks constraints. It uses no GPU."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", __name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._is_ready = False

    def ask(self, constraint: Constraint, check_s: float) -> str | None:
        """Check a constraint; return the reason to reject it, "" if there is none; NOT_CHECKED if
        the process does not start; None if the check took too long or the process died.
        """
        if not self._is_ready and self._answer(START_S) != _READY:
            logger.error("the constraint checker does not start")
            return NOT_CHECKED
        self._is_ready = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(_line_of(constraint))
            self._process.stdin.flush()
        return self._answer(check_s)

    def end(self) -> None:
        self._process.kill()
        with self._process:
            pass  # closes its pipes and waits

    def _answer(self, timeout_s: float) -> str | None:
        """Return the next answer; None if the process ends or `timeout_s` passes first."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return None
        line = self._process.stdout.readline()
        return msgspec.json.decode(line, type=str) if line else None


def installed_checker() -> CheckProcesses | None:
    """Return a new pool of processes that check constraints. If xgrammar is not installed, log a
    warning and return None.
    """
    if find_spec("xgrammar") is None:
        logger.warning("constraints are not checked before they reach the engine: no xgrammar")
        return None
    return CheckProcesses()


def main() -> None:
    """Check the constraints read from stdin until it ends. Exits with code 1 if xgrammar cannot be
    loaded.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    grammar_class = installed_grammar()
    if grammar_class is None:
        sys.exit(1)
    # Prevents library output from mixing with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with Path("/proc/self/statm").open(encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    limit = used + _CHECK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.write(_line_of(_READY))
    for line in sys.stdin.buffer:
        constraint = msgspec.json.decode(line, type=Constraint)
        # Ends this process even if its parent has ended.
        signal.alarm(round(2 * CHECK_S))
        fault = fault_of(grammar_class, constraint)
        signal.alarm(0)
        answers.write(_line_of(fault))


def _line_of(message: Constraint | str) -> bytes:
    return msgspec.json.encode(message) + b"\n"


if __name__ == "__main__":
    main()
