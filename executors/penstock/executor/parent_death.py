"""Makes the kernel kill this process when its parent ends. Has an effect only on Linux."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    # Loaded on import: few functions are safe between fork and exec.
    _prctl = ctypes.CDLL(None).prctl


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when the thread that started it ends. If that was a thread
    of the process `parent` (a pid), which has ended already, kill this process now.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
