"""What an engine in this process shows of its queue, as others do on their boards."""

from __future__ import annotations

from penstock.scheduler.engine import Engine
from penstock.server.link.board import QueueState


class ShownQueue:
    """Shows `engine`'s queue as it stood at the last `turned`.

    `queue_s`: the estimate that is shown with it.
    """

    def __init__(self, engine: Engine, epoch: int = 1) -> None:
        self.num_beats = 1
        self.queue_s: float | None = None
        self._engine = engine
        self._epoch = epoch
        self.queue = self._look()

    def turned(self) -> None:
        """The engine has taken a turn."""
        self.num_beats += 1
        self.queue = self._look()

    def _look(self) -> QueueState:
        queue = self._engine.queue
        return QueueState(
            epoch=self._epoch,
            num_waiting=len(queue),
            num_waiting_tokens=queue.num_tokens,
            estimated_queue_s=self.queue_s if len(queue) else None,
            at_s=0.0,
        )
