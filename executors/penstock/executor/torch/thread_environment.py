"""Determines the environment variables for the number of threads and their waiting policy.

They must be set before torch is loaded, so this module does not import torch.

Fronts (gRPC server processes) share the machine's cores with the engine. Threads that spin for long
between two operators slow down other processes and the engine itself: if a third process runs, two
threads that wait for each other lose an OS time slice per operator (docs/cpu.md has measurements).
Threads that sleep immediately cost a wake-up per operator. So the engine uses the cores that fronts
leave free, and its threads spin for about as long as the gap between two operators. With more
threads than free cores, they spin for a fifth of that time. Variables set by the user take
precedence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_SPINS_ON_FREE_CORES = 5000
_SPINS_ON_SHARED_CORES = 1000
NUM_THREADS_VARIABLE = "OMP_NUM_THREADS"
_POLICY = "OMP_WAIT_POLICY"
_SPINS = "GOMP_SPINCOUNT"
"""Read by GNU's OpenMP runtime, which torch ships on Linux; overrides OMP_WAIT_POLICY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    """The number of compute threads, and how long they spin.

    `num_spins`: how many rounds a thread spins before it sleeps, None if the user's environment
    variables set it.
    """

    num_threads: int
    num_spins: int | None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the process that runs the executor."""
        found = {NUM_THREADS_VARIABLE: str(self.num_threads)}
        if self.num_spins is not None:
            found |= {_POLICY: "passive", _SPINS: str(self.num_spins)}
        return found


def plan_threads(
    *, num_cores: int, num_fronts: int, num_threads: int | None, environ: Mapping[str, str]
) -> ThreadPlan:
    """Return the plan for an engine next to `num_fronts` fronts. `num_threads`: the user's setting;
    it takes precedence over the variables in `environ`. Raises ValueError naming the variable if
    its value is invalid.
    """
    num_free = max(num_cores - num_fronts, 1)
    chosen = num_threads or num_threads_of(environ) or num_free
    if environ.get(_POLICY) or environ.get(_SPINS):
        return ThreadPlan(num_threads=chosen, num_spins=None)
    has_free_cores = chosen <= num_free and num_cores > num_fronts
    return ThreadPlan(
        num_threads=chosen,
        num_spins=_SPINS_ON_FREE_CORES if has_free_cores else _SPINS_ON_SHARED_CORES,
    )


def num_threads_of(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads set in `environ`; None if the variable is unset or blank. Raises
    ValueError naming the variable.
    """
    text = environ.get(NUM_THREADS_VARIABLE, "").strip()
    if not text:
        return None
    # A list has one entry per level of nested parallelism.
    outer = text.partition(",")[0].strip()
    if not (outer.isascii() and outer.isdecimal() and int(outer) > 0):
        raise ValueError(f"{NUM_THREADS_VARIABLE} must be a whole number from 1, not {text!r}")
    return int(outer)


def describe_threads(num_threads: int, environ: Mapping[str, str]) -> str:
    """Describe the number of threads and how they wait, for the log line at start."""
    if num_threads == 1:
        return "1 thread"
    spins, policy = environ.get(_SPINS), environ.get(_POLICY)
    waiting = policy if spins is None else f"{spins} spins"
    return f"{num_threads} threads" + (f" ({waiting})" if waiting else "")
