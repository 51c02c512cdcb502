"""What an engine shows on its board as it goes: its heartbeat, queue and load, and when it rests.

Owns when each is written. Who is in a step is written by `ShownExecutor`.
"""

from collections.abc import Callable

from penstock.server.link.board import EngineBoard
from penstock.server.link.dispatch import Dispatcher


class Display:
    """Tells `board` of the engine of `dispatcher`. The engine's loop calls it, on its thread.

    `queue_size`: how many requests wait, and the tokens they would prefill. `occupancy`: how many
    run, and the blocks they use; `retention_cuts`: what the budget of retention has cut; None where
    that is not shown.
    """

    def __init__(
        self,
        board: EngineBoard,
        dispatcher: Dispatcher,
        queue_size: Callable[[], tuple[int, int]],
        occupancy: Callable[[], tuple[int, int]] | None = None,
        retention_cuts: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._board = board
        self._dispatcher = dispatcher
        self._queue_size = queue_size
        self._occupancy = occupancy
        self._retention_cuts = retention_cuts

    def came_round(self) -> None:
        """The loop lives."""
        self._board.beat()

    def stepped(self) -> None:
        """A turn is over."""
        num_waiting, num_tokens = self._queue_size()
        queue_s = self._dispatcher.newest_queue_s if num_waiting else None
        self._board.show_queue(num_waiting, num_tokens, queue_s)
        if self._occupancy is not None:
            num_running, num_blocks = self._occupancy()
            self._board.show_load(num_running, num_blocks, self._dispatcher.num_output_tokens)
        if self._retention_cuts is not None:
            self._board.show_retention_cuts(*self._retention_cuts())

    def rested(self) -> None:
        """All work is done, and the books balance."""
        self._board.no_step()
