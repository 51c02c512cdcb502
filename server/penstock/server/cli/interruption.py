"""Interruption of commands that own a service: once, and in order.

Owns the signal handlers of such a command. The work is cancelled and cleans up itself.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine
from typing import Any


async def until_signal(work: Coroutine[Any, Any, int], interrupted_line: str) -> int:
    """Run the work; its exit code, or 128 + n when Ctrl-C or SIGTERM (signal n) ended it.

    `interrupted_line` is then written to stderr, after the work has cleaned up.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    interrupted_by = 0

    def interrupt(number: signal.Signals) -> None:
        nonlocal interrupted_by
        # Only once: a second signal must not interrupt the shutdown of the service.
        if not interrupted_by:
            interrupted_by = number
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    print(interrupted_line, file=sys.stderr, flush=True)
    return 128 + interrupted_by
