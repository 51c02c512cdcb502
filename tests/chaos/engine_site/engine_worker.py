"""A worker process of an engine. It holds a lock that the next engine needs, and outlives its
engine.

Arguments: how the worker behaves, and a folder. In the folder it locks a file for this behaviour,
`memory-<behaviour>`, as a process holds an accelerator's memory, and creates the file
`worker-<pid>`.
"""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path


def main(conduct: str, folder: Path) -> None:
    if conduct != "child" and os.fork():
        os._exit(0)  # the worker that stays is detached, in its own session
    if conduct != "child":
        os.setsid()
    # The engine ignores SIGTERM, and its children inherit that.
    wanted = signal.SIG_IGN if conduct == "stubborn" else signal.SIG_DFL
    signal.signal(signal.SIGTERM, wanted)
    memory = (folder / f"memory-{conduct}").open("w")
    try:
        fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("no room", flush=True)
        return
    (folder / f"worker-{os.getpid()}").touch()
    if conduct == "tree":
        # Starts two more workers: a detached one and a plain child.
        program = [sys.executable, __file__]
        with subprocess.Popen([*program, "detached", folder], stdout=subprocess.PIPE) as below:
            assert below.stdout is not None
            below.stdout.readline()
            with subprocess.Popen([*program, "child", folder], stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                child.stdout.readline()
                hold()
    hold()


def hold() -> None:
    """Report the start on stdout, and run until killed."""
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
