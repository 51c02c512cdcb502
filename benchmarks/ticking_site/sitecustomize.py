"""Adds a ticker to the event loop of a front process, so that a benchmark can read the loop's lag.

Python imports a module of this name at start-up. A benchmark puts this folder and the folder of the
benchmarks on PYTHONPATH, and sets `loop_ticks.FOLDER_VARIABLE` to the folder for ticks. Other
processes are unchanged.
"""

import asyncio
import os
import sys


def _tick_with_every_loop() -> None:
    import uvloop

    from loop_ticks import start_ticking

    new_event_loop = uvloop.new_event_loop

    def new_ticking_loop() -> asyncio.AbstractEventLoop:
        loop = new_event_loop()
        loop.call_soon(start_ticking)
        return loop

    uvloop.new_event_loop = new_ticking_loop  # type: ignore[assignment] # a subclass's in the stubs


if (
    "PENSTOCK_BENCHMARK_TICKS" in os.environ
    and "penstock.server.processes.front_process" in sys.orig_argv
):
    _tick_with_every_loop()
