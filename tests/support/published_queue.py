"""A status board for an engine in this process, as an engine process has it in shared memory."""

import os
import weakref

from penstock.scheduler.engine import Engine
from penstock.server.ipc.board import BoardView, EngineBoard, create_board


class PublishedBoard:
    """The status board of the engine of `epoch`, and the `view` that fronts have of it."""

    def __init__(self, epoch: int = 1) -> None:
        self._fd = create_board(1)
        weakref.finalize(self, os.close, self._fd)
        self.view = BoardView(self._fd)
        self.restart(epoch)
        self._board.heartbeat()

    def restart(self, epoch: int) -> None:
        """Publish a new engine that has not stepped yet."""
        self._board = EngineBoard(self._fd, epoch)

    def show(self, num_waiting: int, num_tokens: int = 0, queue_s: float | None = None) -> None:
        """Publish a step of the engine with the number of its waiting requests, the number of their
        tokens, and the predicted queue time in seconds.
        """
        self._board.heartbeat()
        self._board.publish_queue(num_waiting, num_tokens, queue_s)


class PublishedQueue:
    """The status board of an engine in this process, with its queue as of the last `publish`.

    `queue_s`: the queue time, seconds, that is published while requests wait.
    """

    def __init__(self, engine: Engine) -> None:
        self.queue_s: float | None = None
        self._engine, self._board = engine, PublishedBoard()
        self.view = self._board.view
        self.publish()

    def publish(self) -> None:
        """Publish a step of the engine, and the present state of its queue."""
        queue = self._engine.queue
        self._board.show(len(queue), queue.num_tokens, self.queue_s if len(queue) else None)
