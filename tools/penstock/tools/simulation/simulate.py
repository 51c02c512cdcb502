"""Runs a trace through one simulated server, and returns the result.

Owns the order of arrivals in virtual time and the progress lines.
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
"""Interval of progress lines, in real seconds."""
_GC_THRESHOLD = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run: virtual and real seconds since its start, and counts of requests."""

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
    """The result of a run. `wall_s`, `cpu_s`: its wall-clock time, and its CPU time on one core."""

    config: SimulationConfig
    recorder: RunRecorder
    wall_s: float
    cpu_s: float


def simulate(
    trace: Iterable[TraceRequest],
    config: SimulationConfig,
    on_progress: Callable[[Progress], None] | None = None,
) -> SimulationRun:
    """Replay a trace, in order of arrival, until every request has ended.

    The trace is read as a stream. `on_progress` is called about twice a second.
    """
    recorder = RunRecorder(
        slow_gap_s=config.targets.itl_s,
        timeline_bin_s=config.timeline_bin_s,
        sample_every_steps=config.sample_every_steps,
    )
    replica = Replica(config, recorder)
    start_s = time.monotonic()
    start_cpu_s = time.process_time()
    told_s = start_s
    try:
        with few_collections():
            for request in trace:
                replica.run_until(request.arrival_s)
                replica.offer(request)
                wall_s = time.monotonic()
                if on_progress is not None and wall_s - told_s >= PROGRESS_INTERVAL_S:
                    told_s = wall_s
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
def few_collections() -> Generator[None, None, None]:
    """Run Python's cyclic garbage collector less often.

    A step makes a dozen short-lived objects and no cycles; by default the collector would scan all
    objects of the process some hundred times a second.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _progress(replica: Replica, recorder: RunRecorder, wall_s: float) -> Progress:
    num_running = len(replica.engine.running)
    return Progress(
        now_s=replica.now_s,
        wall_s=wall_s,
        num_arrived=len(recorder.table),
        num_ended=recorder.num_ended,
        num_running=num_running,
        num_waiting=replica.num_unfinished - num_running,
    )
