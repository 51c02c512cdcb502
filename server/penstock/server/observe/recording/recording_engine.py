"""An engine that is looked at: the same turns, told to a recorder.

Owns the time of a whole turn. What the engine times is launch to collection; what a service does
between two steps (taking results in, frames to the fronts, frames from them) delays the next one
just as much, so a step here lasts from the end of the one before to its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.scheduler.cache_book import CacheBook
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.engine_listener import EngineListener
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.quotas import TenantQuota
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.scheduler.step_measure import StepMeasure
from penstock.server.observe.recording.recorder import Recorder, Turn


class RecordingEngine:
    """`penstock.server.link.dispatch.EngineCore` over an engine of its own.

    `listener`: see `Engine`.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        clock: Callable[[], float],
        recorder: Recorder,
        listener: EngineListener | None = None,
    ) -> None:
        self.engine = Engine(executor, config, clock, self._on_measure, listener)
        self._clock = clock
        self._recorder = recorder
        self._measure: StepMeasure | None = None
        self._left_s: float | None = None
        """When the last turn ended, if the next was due at once."""

    @property
    def has_work(self) -> bool:
        """See `Engine`."""
        return self.engine.has_work

    @property
    def queue_size(self) -> tuple[int, int]:
        """See `Engine`."""
        return self.engine.queue_size

    @property
    def occupancy(self) -> tuple[int, int]:
        """See `Engine`."""
        return self.engine.occupancy

    @property
    def retention_cuts(self) -> tuple[int, int]:
        """See `Engine`."""
        return self.engine.retention_cuts

    @property
    def ready_fd(self) -> int | None:
        """See `Engine`."""
        return self.engine.ready_fd

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `Engine`."""
        self._recorder.note_submit(specs)
        self.engine.submit(specs)

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """See `Engine`."""
        return self.engine.cancel(key, reason)

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        """See `Engine`."""
        return self.engine.cancel_by_id(request_id)

    def step(self) -> StepEvents:
        """See `Engine`."""
        begun_s = self._clock() if self._left_s is None else self._left_s
        events = self.engine.step()
        left_s = self._clock()
        measure, self._measure = self._measure, None
        if measure is not None:
            seconds = left_s - begun_s
            if self._left_s is None:
                # Launched turns ago, when there are several in flight.
                seconds = max(seconds, measure.seconds)
            measure = replace(measure, seconds=seconds)
        self._recorder.note_turn(Turn(keys=events.keys, ends=events.ends, measure=measure))
        # Whoever has no work waits for some, and one who could compute nothing waits for time.
        self._left_s = left_s if measure is not None and self.engine.has_work else None
        return events

    def next_wakeup_s(self) -> float:
        """See `Engine`."""
        return self.engine.next_wakeup_s()

    def check_next_piece(self) -> bool:
        """See `Engine`."""
        return self.engine.check_next_piece()

    def set_quotas(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        """See `Engine`."""
        self.engine.set_quotas(quotas, default)

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:
        """See `Engine`."""
        self.engine.set_weights(weights, default)

    def look(self) -> tuple[LiveView, ...]:
        """See `Engine`."""
        return self.engine.look()

    def keep_cache_book(self) -> CacheBook:
        """See `Engine`."""
        return self.engine.keep_cache_book()

    def _on_measure(self, measure: StepMeasure) -> None:
        self._measure = measure
