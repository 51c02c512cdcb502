"""Runs many simulations over one trace, in parallel processes.

Results are in the order of the trials, so the number of processes changes only the run time.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TypeAlias

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import Summary, summarise
from penstock.tools.simulation.transform import TransformConfig, transformed
from report import progress

Traffic: TypeAlias = Callable[[Sequence[TraceRequest]], Iterable[TraceRequest]]
"""Returns a trial's requests, given the sweep's trace. Must be a module-level function, because
other processes call it.
"""


def unchanged(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """Return the trace unchanged."""
    return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A simulation to run with `config`: `traffic` is applied to the trace, then `transform`.
    `name`: for display.
    """

    name: str
    config: SimulationConfig
    traffic: Traffic = unchanged
    transform: TransformConfig = field(default_factory=TransformConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a trial. `cpu_s`: CPU time of the simulation, seconds."""

    trial: Trial
    summary: Summary
    cpu_s: float


Sweep: TypeAlias = Callable[[Sequence[Trial]], list[TrialResult]]
"""Runs trials, and returns their results in the same order; raises the exceptions of a trial."""


@contextmanager
def sweep(trace: Sequence[TraceRequest], num_jobs: int) -> Generator[Sweep]:
    """Yield a function that runs trials over `trace` in `num_jobs` processes."""
    # Not forked: a child must not inherit threads and locks of this process.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_jobs, context, initializer=_begin, initargs=(trace,))

    def run(trials: Sequence[Trial]) -> list[TrialResult]:
        futures = [pool.submit(_run, trial) for trial in trials]
        for number, future in enumerate(as_completed(futures), 1):
            done = future.result()
            progress(
                f"  [{number}/{len(trials)}] {done.trial.name}:"
                f" {done.summary.good_share:.1%} good, {done.cpu_s:.1f} s"
            )
        return [future.result() for future in futures]

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


_trace: Sequence[TraceRequest] = ()


def _begin(trace: Sequence[TraceRequest]) -> None:
    """Store the trace in a process of the pool, so that trials are sent without it."""
    global _trace
    _trace = trace
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Terminate the process when its parent ends, because a pool process would otherwise never
    exit.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(trial: Trial) -> TrialResult:
    run = simulate(transformed(trial.traffic(_trace), trial.transform), trial.config)
    return TrialResult(trial=trial, summary=summarise(run), cpu_s=run.cpu_s)
