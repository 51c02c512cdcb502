"""How many threads compute and how they wait, set in the environment before torch loads.

Imports nothing heavy.

Fronts share the machine's cores with the engine. Threads that spin between two operators for long
slow down every other process, and the engine itself: two that wait for each other lose a
scheduler's slice per operator when a third process runs (a decode step then takes 3 to 20 times as
long). Threads that sleep at once cost a wake-up per operator. So the engine uses the cores that
fronts leave free, where its threads spin for about as long as the gap between two operators. With
more threads than that, they spin a fifth of it.
"""

from dataclasses import dataclass

_SPINS_ALONE = 5000
_SPINS_IN_COMPANY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    """`num_threads` that compute; `num_spins`: rounds that a thread spins before it sleeps."""

    num_threads: int
    num_spins: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the process that runs the executor."""
        return {
            "OMP_NUM_THREADS": str(self.num_threads),
            "OMP_WAIT_POLICY": "passive",
            # GNU's runtime, which torch brings on Linux; others ignore it.
            "GOMP_SPINCOUNT": str(self.num_spins),
        }


def plan_threads(*, num_cores: int, num_fronts: int, num_threads: int | None = None) -> ThreadPlan:
    """For an engine next to `num_fronts`; `num_threads`: the operator's choice."""
    num_free = max(num_cores - num_fronts, 1)
    chosen = num_threads or num_free
    is_alone = chosen <= num_free and num_cores > num_fronts
    return ThreadPlan(num_threads=chosen, num_spins=_SPINS_ALONE if is_alone else _SPINS_IN_COMPANY)
