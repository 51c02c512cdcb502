"""Runs a program that is killed when its parent dies: `python leash.py PROGRAM ...`.

Ray ends a replica with SIGKILL, which cannot be forwarded. So the kernel kills the program, and the
supervisor's children end with the supervisor.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process with the program. Linux only, like this whole module."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == 1:
        sys.exit("leash: the parent process is gone")
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
