"""Delivers statistics to their reader with a delay: the real dispatcher sleeps between reads."""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any

from tensorrt_llm.executor.async_queue import AsyncQueue, EventLoopShutdownError
from tensorrt_llm.executor.result import IterationResult
from tensorrt_llm.fake_control import Settings

MAX_KEPT_IN_ENGINE = 1000


class StatsDispatch:
    """Keeps the engine's statistics for the next read; beyond a limit it drops the oldest."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kept: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT_IN_ENGINE)
        self._changed = threading.Condition()
        self._is_pushed = settings.stats == "push"
        self._result: IterationResult | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, result: IterationResult) -> None:
        """Start to deliver, after the first submission."""
        if not self._is_pushed:
            return
        self._result = result
        if self._settings.stats_lag_s > 0.0:
            self._thread = threading.Thread(target=self._run, name="fake-stats", daemon=True)
            self._thread.start()

    def put(self, stats: dict[str, Any]) -> None:
        """Accept statistics from the engine loop; deliver them at once if there is no lag."""
        with self._changed:
            self._kept.append(stats)
            self._changed.notify_all()
        if self._settings.stats_lag_s <= 0.0:
            self._deliver()

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def fetch(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Return all statistics, after `timeout_s` at the latest. Blocks the caller's thread."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._kept), timeout_s)
            found = list(self._kept)
            self._kept.clear()
        return found

    def stop(self) -> None:
        """Stop delivering."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(max(0.001, self._settings.stats_lag_s)):
            self._deliver()

    def _deliver(self) -> None:
        result = self._result
        if result is None or not self._kept:
            return
        target = result.queue
        while self._kept:
            stats = self._kept.popleft()
            if isinstance(target, queue.Queue):
                target.put(stats)
            else:
                target.put_nowait(stats)
        if isinstance(target, AsyncQueue):
            try:
                AsyncQueue.notify_many(target.loop, [target])
            except EventLoopShutdownError:
                self._stopped.set()
