"""Runs a program that is killed when its parent dies: `python parent_guard.py PROGRAM ...`.

Ray may end a replica with SIGKILL, and a process cannot forward SIGKILL to its children. Therefore
this program sets PR_SET_PDEATHSIG, so that the kernel kills `penstock serve` when its parent dies.
The child processes of `penstock serve` end with it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process with the program (Linux only). Exits with an error if the parent process
    has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == 1:
        sys.exit("parent_guard: the parent process is gone")
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
