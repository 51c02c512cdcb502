"""Processes that play games end with whoever began them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
MAX_WAIT_S = 60.0
# As `play_all` begins its pool; then it waits to be killed.
PARENT = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from support.game_runs import watch_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=watch_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    sys.stdin.read()
"""


def test_a_worker_of_a_killed_run_ends() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not select.select([worker], [], [], 0.0)[0]
            parent.kill()
            has_ended = bool(select.select([worker], [], [], MAX_WAIT_S)[0])
            if not has_ended:
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            assert has_ended
        finally:
            os.close(worker)
