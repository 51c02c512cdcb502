"""Runs a program that is killed when its parent dies: `python parent_guard.py PROGRAM ...`.

Ray may end a replica with SIGKILL, and a process cannot forward SIGKILL to its children. Therefore
this program makes the kernel kill `penstock serve` when its parent dies. The child processes of
`penstock serve` end with it.
"""

import os
import sys

from penstock.executor.parent_death import die_with_parent


def main() -> None:
    """Replace this process with the program (Linux only). Exits with an error if the parent process
    has already ended."""
    die_with_parent()
    if os.getppid() == 1:
        sys.exit("parent_guard: the parent process is gone")
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
