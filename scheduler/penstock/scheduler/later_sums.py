"""Sums over later arrivals: amounts recorded at all places above a given one.

Owns the tree and the bound on its size. Does not know what is summed.
"""

from collections.abc import Sequence

MIN_PLACES = 1 << 12


class LaterSums:
    """Integers recorded at places 0, 1, ...; `later(place)` adds up those at greater places.

    A binary indexed tree (Fenwick, "A New Data Structure for Cumulative Frequency Tables", 1994),
    laid out for sums towards its end: both calls take as many additions as a place has digits, and
    a place without amounts above it takes none.
    """

    __slots__ = ("_greatest", "_tree")

    def __init__(self, num_places: int) -> None:
        self._tree = [0] * (num_places + 1)
        # Nothing is recorded above it.
        self._greatest = -1

    def note(self, place: int, amount: int) -> None:
        """Add `amount` at a place."""
        if place > self._greatest:
            self._greatest = place
        tree, at = self._tree, place + 1
        while at:
            tree[at] += amount
            at &= at - 1

    def later(self, place: int) -> int:
        """The sum over all places above this one."""
        if place >= self._greatest:
            return 0
        tree, at = self._tree, place + 2
        total, end = 0, len(tree)
        while at < end:
            total += tree[at]
            at += at & -at
        return total

    def moved(self, places: Sequence[int], num_places: int) -> "LaterSums":
        """The same sums for entries at `places`, ascending, which are now at 0, 1, ...

        Amounts above the last of them are found at the place behind it, `len(places)`.
        """
        made = LaterSums(num_places)
        sums = [self.later(place) for place in places]
        if not sums or not sums[0]:
            return made
        made._greatest = last = len(sums)
        # Of each place, the amounts from it on: those after the entry before it.
        from_place = [sums[0], *sums, *[0] * (last + 1)]
        made._tree[1 : last + 2] = [
            from_place[at - 1] - from_place[at - 1 + (at & -at)] for at in range(1, last + 2)
        ]
        return made
