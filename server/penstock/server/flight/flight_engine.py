"""An engine whose flight is recorded: the same turns, written to memory that outlives it.

Owns the two places where it listens: the executor seam, where a step is still whole when it is
launched, and the turn, whose news say what came of it. A fault of the recorder ends the recording,
never the service.
"""

import logging
from collections.abc import Callable

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.flight.writer import FlightWriter
from penstock.server.link.dispatch import EngineCore
from penstock.server.recording.recorder import Recorder
from penstock.server.recording.recording_engine import RecordingEngine

log = logging.getLogger(__name__)


class FlightExecutor:
    """An `Executor` that tells the recorder what it is about to launch on another one."""

    def __init__(
        self, executor: Executor, writer: FlightWriter, clock: Callable[[], float]
    ) -> None:
        self._executor = executor
        self._writer: FlightWriter | None = writer
        self._clock = clock
        self._launch = executor.launch
        # As it is: this is passed in every step.
        self.collect: Callable[[], StepResult] = executor.collect

    @property
    def info(self) -> ExecutorInfo:
        """See `Executor`."""
        return self._executor.info

    @property
    def ready_fd(self) -> int | None:
        """See `Executor`."""
        return self._executor.ready_fd

    def launch(self, batch: Batch) -> None:
        """See `Executor`."""
        if self._writer is not None:
            try:
                self._writer.note_launch(batch, self._clock())
            except Exception:
                # A bug there must not look like one of the engine's.
                log.exception("the flight recorder failed at a launch and stops listening")
                self._writer = None
        self._launch(batch)

    def close(self) -> None:
        """See `Executor`."""
        self._executor.close()


class FlightEngine:
    """`penstock.server.link.dispatch.EngineCore` around another one.

    That one runs a `FlightExecutor` and tells `writer.note_step` of its steps:
    `build_flight_engine` puts it together.
    """

    def __init__(self, core: EngineCore, writer: FlightWriter) -> None:
        self.core = core
        self._writer: FlightWriter | None = writer

    @property
    def has_work(self) -> bool:
        """See `Engine`."""
        return self.core.has_work

    @property
    def ready_fd(self) -> int | None:
        """See `Engine`."""
        return self.core.ready_fd

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `Engine`."""
        if self._writer is not None:
            try:
                self._writer.note_requests(specs)
            except Exception:
                # A bug there must not look like one of the engine's.
                log.exception("the flight recorder failed and writes no more")
                self._writer = None
        self.core.submit(specs)

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """See `Engine`."""
        return self.core.cancel(key, reason)

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        """See `Engine`."""
        return self.core.cancel_by_id(request_id)

    def step(self) -> StepEvents:
        """See `Engine`."""
        events = self.core.step()
        if self._writer is not None:
            try:
                self._writer.note_turn(events)
            except Exception:
                # A bug there must not look like one of the engine's.
                log.exception("the flight recorder failed and writes no more")
                self._writer = None
        return events

    def next_wakeup_s(self) -> float:
        """See `Engine`."""
        return self.core.next_wakeup_s()

    def check_integrity(self) -> None:
        """See `Engine`."""
        self.core.check_integrity()

    def look(self) -> tuple[LiveView, ...]:
        """See `Engine`."""
        return self.core.look()


def build_flight_engine(
    executor: Executor,
    config: SchedulerConfig,
    clock: Callable[[], float],
    writer: FlightWriter,
    recorder: Recorder | None = None,
) -> FlightEngine:
    """An engine on `executor` that `writer` writes down, and `recorder` too where there is one."""
    seam = FlightExecutor(executor, writer, clock)
    core: EngineCore
    if recorder is None:
        core = Engine(seam, config, clock, on_step=writer.note_step)
    else:
        core = RecordingEngine(seam, config, clock, recorder, on_step=writer.note_step)
    return FlightEngine(core, writer)
