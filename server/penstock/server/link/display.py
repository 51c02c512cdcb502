"""What an engine shows on its board as it goes: its heartbeat, its queue, that nothing is going on.

Owns when each is written. Who is in a step is written by `ShownExecutor`.
"""

from collections.abc import Callable

from penstock.server.link.board import EngineBoard
from penstock.server.link.dispatch import Dispatcher


class Display:
    """Tells `board` of the engine of `dispatcher`. The engine's loop calls it, on its thread.

    `queue_size`: how many requests wait, and the tokens they would prefill.
    """

    def __init__(
        self,
        board: EngineBoard,
        dispatcher: Dispatcher,
        queue_size: Callable[[], tuple[int, int]],
    ) -> None:
        self._board = board
        self._dispatcher = dispatcher
        self._queue_size = queue_size

    def came_round(self) -> None:
        """The loop lives."""
        self._board.beat()

    def stepped(self) -> None:
        """A turn is over."""
        num_waiting, num_tokens = self._queue_size()
        queue_s = self._dispatcher.newest_queue_s if num_waiting else None
        self._board.show_queue(num_waiting, num_tokens, queue_s)

    def rested(self) -> None:
        """All work is done, and the books balance."""
        self._board.no_step()
