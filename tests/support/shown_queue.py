"""The board of an engine in this process, as an engine process publishes its own."""

from __future__ import annotations

import os
import weakref

from penstock.scheduler.engine import Engine
from penstock.server.link.board import BoardView, EngineBoard, create_board


class ShownBoard:
    """The board of the engine of `epoch`, and the `view` that fronts have of it."""

    def __init__(self, epoch: int = 1) -> None:
        self._fd = create_board(1)
        weakref.finalize(self, os.close, self._fd)
        self.view = BoardView(self._fd)
        self.restart(epoch)
        self._board.beat()

    def restart(self, epoch: int) -> None:
        """Another engine has begun, and taken no turn yet."""
        self._board = EngineBoard(self._fd, epoch)

    def show(self, num_waiting: int, num_tokens: int = 0, queue_s: float | None = None) -> None:
        """The engine has taken a turn, and has so many waiting."""
        self._board.beat()
        self._board.show_queue(num_waiting, num_tokens, queue_s)


class ShownQueue:
    """Shows `engine`'s queue as it stood at the last `turned`.

    `queue_s`: the estimate that is shown with it.
    """

    def __init__(self, engine: Engine) -> None:
        self.queue_s: float | None = None
        self._engine, self._board = engine, ShownBoard()
        self.view = self._board.view
        self.turned()

    def turned(self) -> None:
        """The engine has taken a turn."""
        queue = self._engine.queue
        self._board.show(len(queue), queue.num_tokens, self.queue_s if len(queue) else None)
