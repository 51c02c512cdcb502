"""Time from exec of `penstock serve` to its ready line, and from SIGTERM to its end.

Every run starts new processes with the demo model on a free port. The first run, which may have to
read files from disk, is reported separately. Goal: ready in under 6 s.
"""

import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from report import arguments, at_most, conclude, print_table
from services import service

READY_GOAL_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The times of one start and stop, seconds. `cpu_s`: user and system time of all its
    processes.
    """

    executor: str
    is_first: bool
    ready_s: float
    end_s: float
    cpu_s: float


def main() -> None:
    options = arguments(__doc__).parse_args()
    num_runs = 11 if options.full else 4
    runs = [measure("simulated", is_first=False)]
    runs += [measure("torch", is_first=index == 0) for index in range(num_runs)]
    header = ("executor", "first", "ready s", "end s", "cpu s")
    rows = [(r.executor, r.is_first, r.ready_s, r.end_s, r.cpu_s) for r in runs]
    print_table(f"penstock serve, {os.cpu_count()} cores, load {load():.1f}", header, rows)
    checks = [at_most("serve_ready_median", median_ready_s(runs), READY_GOAL_S, "s")]
    conclude(options, {"runs": [asdict(run) for run in runs], "load_average": load()}, checks)


def measure(executor: str, *, is_first: bool) -> Run:
    """Start a service with default ports and fronts, wait until it is ready, stop it."""
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


def median_ready_s(runs: Sequence[Run]) -> float:
    """Return the median time until ready with the torch executor, without the first run."""
    return statistics.median(
        run.ready_s for run in runs if run.executor == "torch" and not run.is_first
    )


def load() -> float:
    """Return the load average of the last minute, reported because other processes slow down a
    start.
    """
    return os.getloadavg()[0]


if __name__ == "__main__":
    main()
