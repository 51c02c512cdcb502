"""A process of the engine, as MPI starts one. It only sleeps, until it is killed or its lifetime
ends.

It survives the death of its parent, as real workers may for some time. If it exits before `stop`,
the engine is notified.
"""

import subprocess
import sys
import threading
from collections.abc import Callable

_PROGRAM = "import sys, time; time.sleep(float(sys.argv[1]))"


class WorkerProcess:
    """A process that the constructor starts. `on_death` is called in a thread when the process
    ends, unless `stop` was called.
    """

    def __init__(self, lifetime_s: float, on_death: Callable[[], None]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(lifetime_s)], stdin=subprocess.DEVNULL
        )
        self._is_stopping = False
        self._on_death = on_death
        self._watch = threading.Thread(target=self._wait, name="fake-worker-watch", daemon=True)
        self._watch.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._process.kill()
        if threading.current_thread() is not self._watch:
            self._watch.join(10.0)

    def _wait(self) -> None:
        self._process.wait()
        if not self._is_stopping:
            self._on_death()
