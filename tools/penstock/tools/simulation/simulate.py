"""Runs a trace through one simulated server, and returns the result.

Submits requests at their arrival in virtual time, and reports the progress.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.recorder import RunRecorder
from penstock.tools.simulation.replica import Replica
from penstock.tools.simulation.settings import SimulationConfig

PROGRESS_INTERVAL_S = 0.5
"""Minimum interval between progress reports, in real seconds."""
_GC_THRESHOLD = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationProgress:
    """Progress of a run since its start: virtual seconds `now_s`, real seconds `wall_s`, and
    numbers of requests. `num_waiting` includes requests held back before the engine.
    """

    now_s: float
    wall_s: float
    num_arrived: int
    num_ended: int
    num_running: int
    num_waiting: int

    @property
    def text(self) -> str:
        """The progress as one line."""
        minutes, rest_s = divmod(int(self.now_s), 60)
        speed = self.now_s / self.wall_s if self.wall_s else 0.0
        return (
            f"{minutes // 60}:{minutes % 60:02}:{rest_s:02} simulated, {speed:,.0f}x;"
            f" {self.num_ended:,} of {self.num_arrived:,} ended,"
            f" {self.num_running:,} running, {self.num_waiting:,} waiting"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationRun:
    """The result of one simulated run. `wall_s`, `cpu_s`: wall-clock time and CPU time that the
    simulation took, seconds.
    """

    config: SimulationConfig
    recorder: RunRecorder
    wall_s: float
    cpu_s: float


def simulate(
    trace: Iterable[TraceRequest],
    config: SimulationConfig,
    on_progress: Callable[[SimulationProgress], None] | None = None,
) -> SimulationRun:
    """Replay a trace until every request has ended. The trace must be in order of arrival. Raises
    SimulationStuck.

    The trace is read as a stream. `on_progress` is called when requests arrive, at most twice per
    second, and at the end.
    """
    recorder = RunRecorder(
        slow_gap_s=config.targets.itl_s,
        timeline_bin_s=config.timeline_bin_s,
        sample_every_steps=config.sample_every_steps,
    )
    replica = Replica(config, recorder)
    start_s = time.monotonic()
    start_cpu_s = time.process_time()
    reported_s = start_s
    try:
        with infrequent_gc():
            for request in trace:
                replica.run_until(request.arrival_s)
                replica.offer(request)
                wall_s = time.monotonic()
                if on_progress is not None and wall_s - reported_s >= PROGRESS_INTERVAL_S:
                    reported_s = wall_s
                    on_progress(_progress(replica, recorder, wall_s - start_s))
            replica.finish()
    finally:
        replica.engine.close()
    recorder.flush()
    wall_s = time.monotonic() - start_s
    if on_progress is not None:
        on_progress(_progress(replica, recorder, wall_s))
    cpu_s = time.process_time() - start_cpu_s
    return SimulationRun(config=config, recorder=recorder, wall_s=wall_s, cpu_s=cpu_s)


@contextlib.contextmanager
def infrequent_gc() -> Generator[None, None, None]:
    """Inside the block, run Python's cyclic garbage collector less often.

    A step creates a dozen short-lived objects and no cycles; by default the collector would scan
    all objects of the process hundreds of times per second.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _progress(replica: Replica, recorder: RunRecorder, wall_s: float) -> SimulationProgress:
    num_running = len(replica.engine.running)
    return SimulationProgress(
        now_s=replica.now_s,
        wall_s=wall_s,
        num_arrived=len(recorder.table),
        num_ended=recorder.num_ended,
        num_running=num_running,
        num_waiting=replica.num_unfinished - num_running,
    )
