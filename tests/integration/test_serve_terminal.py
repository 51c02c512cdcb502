from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

from support.service import simulated
from support.timeout import TEST_TIMEOUT_S

SHORT_LINE = re.compile(r"\d\d:\d\d:\d\d [a-z]+( \d+)?: \S")


@contextmanager
def serving_on_a_terminal() -> Generator[tuple[subprocess.Popen[bytes], int]]:
    """Start a service whose stdout and stderr are one pseudo-terminal; provide the process and the
    other end.
    """
    ours, theirs = pty.openpty()
    ports = ("--port", "0", "--operations-port", "0", "--metrics-port", "0")
    process = subprocess.Popen(
        (sys.executable, "-m", "penstock.tools", "serve", *simulated(), *ports),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    # A hung service is killed, which also ends every read of the terminal.
    signal.signal(signal.SIGALRM, lambda *_: process.kill())
    signal.alarm(int(TEST_TIMEOUT_S))
    try:
        yield process, ours
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, mark: bytes) -> str:
    """Return the terminal's output up to `mark`, or to its end."""
    shown = b""
    while mark not in shown:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # how Linux reports that the last writer is gone
            break
        shown += piece
    return shown.decode()


def test_a_terminal_shows_one_banner_short_log_lines_and_nothing_twice() -> None:
    with serving_on_a_terminal() as (process, terminal):
        shown = read_until(terminal, b"Ctrl-C")
        process.send_signal(signal.SIGINT)
        shown += read_until(terminal, b"no such mark")
        assert process.wait() == 0
    lines = [line for line in shown.splitlines() if line]
    rows = [line for line in lines if line.startswith("  ")]
    names = [name for line in rows if (name := line[2:15].strip())]
    assert names == ["model", "address", "operations", "status page", "try", "stop"], shown
    address = next(line for line in rows if "address " in line).split()[1]
    assert any(re.search(r"http://127\.0\.0\.1:\d+/$", line) for line in rows)
    suggested = f' generate "Once upon a time" --address {address}'
    assert any(line.endswith(suggested) for line in rows)
    assert lines[0].endswith(" is starting ...")
    assert lines[1].startswith("Loading ")
    ready = next(line for line in lines if line.startswith("Penstock is ready after "))
    assert lines[-1] == "Penstock has stopped."
    others = [line for line in lines[2:-1] if line not in (ready, *rows)]
    assert all(SHORT_LINE.match(line) for line in others), others
    assert [line for line in others if "is ready" in line or "starting" in line] == []
    # Only the suggested command repeats the address, because it is to be copied.
    assert shown.count(address) == 2
    assert len(set(lines)) == len(lines)
