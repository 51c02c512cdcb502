"""Runs many trials over one trace, in as many processes as there are cores.

Results are in the order of the trials, so the number of processes changes only the run time.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from penstock.server.observe.recording.trace import TraceRequest
from penstock.server.usable_cores import num_usable_cores
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import Summary, summarise
from penstock.tools.simulation.transform import TransformConfig, transformed

Traffic = Callable[[Sequence[TraceRequest]], Iterable[TraceRequest]]
"""Returns a trial's requests, given the sweep's trace. Must be a module-level function, because
other processes call it.
"""


def whole(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return the trace unchanged."""
    return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A simulation to run with `config`: `traffic` is applied to the trace, then `transform`.
    `name`: for display.
    """

    name: str
    config: SimulationConfig
    traffic: Traffic = whole
    transform: TransformConfig = field(default_factory=TransformConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a trial. `cpu_s`: CPU time of one core."""

    trial: Trial
    summary: Summary
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """The report of a finished trial: its result, number of finished trials, and time since the
    start.
    """

    num_done: int
    num_trials: int
    wall_s: float
    result: TrialResult


class Sweep:
    """Runs trials over one trace. `on_progress` is called when a trial ends, in any order."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        pool: ProcessPoolExecutor | None,
        on_progress: Callable[[SweepProgress], None] | None = None,
    ) -> None:
        self.trace = trace
        self._pool = pool
        self._on_progress = on_progress

    def run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        """Return the results in the order of the trials. Raises the exceptions of a run."""
        start_s = time.monotonic()
        results: dict[int, TrialResult] = {}
        for index, result in self._results(trials):
            results[index] = result
            if self._on_progress is not None:
                wall_s = time.monotonic() - start_s
                self._on_progress(
                    SweepProgress(
                        num_done=len(results),
                        num_trials=len(trials),
                        wall_s=wall_s,
                        result=result,
                    )
                )
        return [results[index] for index in range(len(trials))]

    def _results(self, trials: Sequence[Trial]) -> Iterator[tuple[int, TrialResult]]:
        if self._pool is None:
            for index, trial in enumerate(trials):
                yield index, run_trial(self.trace, trial)
            return
        index_of: dict[Future[TrialResult], int] = {
            self._pool.submit(_run_here, trial): index for index, trial in enumerate(trials)
        }
        try:
            for future in as_completed(index_of):
                yield index_of[future], future.result()
        finally:
            # After a failed trial, do not wait for the other trials.
            for future in index_of:
                future.cancel()


@contextmanager
def sweep(
    trace: Sequence[TraceRequest],
    num_jobs: int | None = None,
    on_progress: Callable[[SweepProgress], None] | None = None,
    set_up: Callable[[], None] | None = None,
) -> Generator[Sweep]:
    """Yield a `Sweep` with `num_jobs` processes; None: one per usable core; 1: in this process.

    `set_up`: called first in each process that runs trials.
    """
    num = num_usable_cores() if num_jobs is None else num_jobs
    if num < 1:
        raise ValueError(f"num_jobs must be at least 1, not {num}")
    if num == 1:
        if set_up is not None:
            set_up()
        yield Sweep(trace, None, on_progress)
        return
    # Not forked: a child must not inherit threads and locks of this process.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num, context, initializer=_begin, initargs=(trace, set_up))
    try:
        yield Sweep(trace, pool, on_progress)
    finally:
        pool.shutdown(cancel_futures=True)


def run_trial(trace: Sequence[TraceRequest], trial: Trial) -> TrialResult:
    """Run one trial in this process."""
    run = simulate(transformed(trial.traffic(trace), trial.transform), trial.config)
    return TrialResult(trial=trial, summary=summarise(run), cpu_s=run.cpu_s)


_trace: Sequence[TraceRequest] = ()


def _begin(trace: Sequence[TraceRequest], set_up: Callable[[], None] | None) -> None:
    """Send the trace to a process once instead of with every trial."""
    global _trace
    _trace = trace
    if set_up is not None:
        set_up()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Terminate the process when its parent ends, because a pool process would otherwise never
    exit.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run_here(trial: Trial) -> TrialResult:
    return run_trial(_trace, trial)
