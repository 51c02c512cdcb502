"""Finds the smallest number of replicas that meets a target.

Owns the search. Makes no assumption about the trials: the answer is a number that passed next to
one that failed.
"""

from collections.abc import Callable


def least_replicas(
    meets: Callable[[int], bool], *, first_guess: int, max_replicas: int
) -> int | None:
    """A number n <= `max_replicas` with `meets(n)` and not `meets(n - 1)`; None if there is none.

    0 replicas count as failed and are not tried. From `first_guess` the search moves up or down in
    doubling steps, then bisects the rest (galloping, as in Bentley and Yao, "An Almost Optimal
    Algorithm for Unbounded Searching", 1976). Every number is tried at most once; n and n - 1 both
    were. If more replicas can serve worse, another number below n may pass too. The result is None
    only if `max_replicas` failed.
    """
    if max_replicas < 1:
        raise ValueError(f"max_replicas must be at least 1, not {max_replicas}")
    low, high, step = 0, max_replicas + 1, 1
    has_held = has_failed = False
    num = min(max(first_guess, 1), max_replicas)
    while high - low > 1:
        if meets(num):
            high, has_held = num, True
        else:
            low, has_failed = num, True
        if has_held and has_failed:
            num = (low + high) // 2
        elif has_held:
            num = max(1, high - step)
        else:
            num = min(max_replicas, low + step)
        step *= 2
    return high if has_held else None
