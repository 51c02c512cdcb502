"""Measures the time from exec of `penstock serve` to its ready line, and from SIGTERM to its end.

Every run starts new processes with the demo model on a free port: once with the simulated executor,
then several times with the torch executor. Goal: a median of under 6 s until ready with the torch
executor. Its first run does not count, because it may have to read files from disk.
"""

import os
import resource
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass

from report import Outcome, arguments, at_most, print_rows, run
from services import service

READY_GOAL_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The times of one start and stop, seconds. `cpu_s`: user and system time of all processes of
    the service.
    """

    executor: str
    is_first: bool
    ready_s: float
    end_s: float
    cpu_s: float


def measure(options: Namespace) -> Outcome:
    """Start services one after another, the simulated executor first."""
    runs = [one_run("simulated", is_first=False)]
    num_runs = 11 if options.full else 4
    runs += [one_run("torch", is_first=index == 0) for index in range(num_runs)]
    # Other processes slow down a start.
    print_rows(f"penstock serve, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", runs)
    ready_s = [one.ready_s for one in runs if one.executor == "torch" and not one.is_first]
    return runs, [at_most("serve_ready_median", statistics.median(ready_s), READY_GOAL_S, "s")]


def one_run(executor: str, *, is_first: bool) -> Run:
    """Start a service on free ports with the default number of fronts, wait until it is ready, and
    stop it; return the times.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_s = time.perf_counter()
    options = ("--executor", executor, "--log-level", "error")
    with service(*options, num_fronts=None, has_operations=True, has_metrics=True) as found:
        ready_s = time.perf_counter() - started_s
        found.end()
        end_s = time.perf_counter() - started_s - ready_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(
        executor=executor,
        is_first=is_first,
        ready_s=ready_s,
        end_s=end_s,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


if __name__ == "__main__":
    run(arguments(__doc__), measure)
