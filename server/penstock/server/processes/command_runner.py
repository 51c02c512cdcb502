"""Runs an operator's commands in this process: set the log level, sample the stacks.

Does not know which connection a command came from.
"""

import contextlib
import logging
import threading
from collections.abc import Callable

from penstock.server.link.frames import Command, CommandKind, CommandResult
from penstock.server.observe.logs import set_log_level
from penstock.server.processes.stack_sampler import sample

log = logging.getLogger(__name__)


class Orders:
    """Runs commands in this process; `process` is its name in results."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._sampling = threading.Lock()

    def carry_out(self, order: Command, answer: Callable[[CommandResult], None]) -> None:
        """Start a command; `answer` is called once, here or on another thread. Never raises."""
        try:
            match order.kind:
                case CommandKind.LOG_LEVEL:
                    set_log_level(order.argument)
                    log.info("log level is %s", order.argument)
                    answer(CommandResult(ticket=order.ticket))
                case CommandKind.PROFILE:
                    self._profile(order.ticket, float(order.argument), answer)
        except ValueError as error:
            answer(CommandResult(ticket=order.ticket, problem=str(error)))

    def _profile(
        self, ticket: int, seconds: float, answer: Callable[[CommandResult], None]
    ) -> None:
        if not self._sampling.acquire(blocking=False):
            raise ValueError(f"{self._process} is being sampled already")

        def work() -> None:
            try:
                done = CommandResult(ticket=ticket, payload=sample(self._process, seconds))
            except ValueError as error:
                done = CommandResult(ticket=ticket, problem=str(error))
            finally:
                self._sampling.release()
            # The event loop of the receiver may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                answer(done)

        log.info("sampling for %g s", seconds)
        threading.Thread(target=work, name="sampler", daemon=True).start()
