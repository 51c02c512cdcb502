"""The least number of replicas that holds.

Owns the search. Does not know what is tried, and trusts only trials: the answer is a number
that held next to one that did not.
"""

from collections.abc import Callable


def least_replicas(
    meets: Callable[[int], bool], *, first_guess: int, max_replicas: int
) -> int | None:
    """A number n <= `max_replicas` with `meets(n)` and not `meets(n - 1)`; None if there is none.

    Nothing serves with 0 replicas, which is not tried. From `first_guess` on the search goes up or
    down in steps that double, then halves what is left (galloping, as in Bentley and Yao, "An
    Almost Optimal Algorithm for Unbounded Searching", 1976). Every number is tried once at most,
    and both n and n - 1 were. Where more replicas serve worse, which no rule forbids, another
    number below n may hold too. None was returned means that `max_replicas` failed.
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
