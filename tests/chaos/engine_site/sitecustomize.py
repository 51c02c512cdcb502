"""Changes the engine process of a test: while the process loads, it starts worker processes, fails
or hangs.

Python imports a module of this name at its start: a test puts this folder on PYTHONPATH and sets
ENGINE_CONDUCT to the behaviour (see test_orphans.py). All other processes are unchanged.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.executor import create
from penstock.executor.config import ExecutorConfig
from penstock.scheduler.executor import Executor

HERE = Path(__file__).parent
_create_executor = create.create_executor


def create_executor(config: ExecutorConfig) -> Executor:
    """Do what the test configured in ENGINE_CONDUCT, then create the real executor."""
    conduct: dict[str, Any] = json.loads(os.environ["ENGINE_CONDUCT"])
    folder = Path(conduct["folder"])
    life = 1 + len(list(folder.glob("life-*")))
    (folder / f"life-{life}").touch()
    if conduct["worker"] is not None:
        start_worker([conduct["worker"], str(folder)])
    if conduct["load"] == "raises":
        raise RuntimeError("the driver is\ntoo old")
    if conduct["load"] == "exits":
        sys.exit("the launcher\nwas not found")
    if conduct["load"] == "crashes":
        os.abort()
    if conduct["load"] == "sticks" and life >= conduct["sticks_from_life"]:
        print("the load is stuck", file=sys.stderr, flush=True)
        ctypes.PyDLL(None).pause()  # foreign code that keeps the interpreter to itself
    return _create_executor(config)


def start_worker(arguments: list[str]) -> None:
    """Start a worker process, and return once it has locked its file. Raises MemoryError if an
    earlier worker still holds the lock.
    """
    program = [sys.executable, str(HERE / "engine_worker.py"), *arguments]
    # The pipe stays open as long as a worker lives.
    worker = subprocess.Popen(program, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    word = worker.stdout.readline()
    if word != b"ready\n":
        raise MemoryError("a worker of before holds the memory")


if "penstock.server.processes.engine_process" in sys.orig_argv:
    create.create_executor = create_executor
