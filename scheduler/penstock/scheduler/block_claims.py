"""What requests asked for the blocks they left behind: a level, for a while.

Owns the claims and when they lapse. Does not know which blocks are cached.

A block that several requests left has the highest level that one of them asked for, for as long as
that one asked; of equal levels the longer stay counts. A claim below the default holds only while
nobody else has left the block: a request that gives its own prompt up early must not drag down the
head that it shares with others.
"""

import heapq
from collections.abc import Iterable

from penstock.scheduler.cached_blocks import DEFAULT_LEVEL
from penstock.scheduler.check_pieces import Faults, pieces


class BlockClaims:
    """Blocks that are to stand elsewhere than at the default level."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[int, float]] = {}
        self._ends: list[tuple[float, int]] = []
        self._num_low = 0

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, block: int) -> bool:
        return block in self._claims

    @property
    def num_low(self) -> int:
        """Claims below the default."""
        return self._num_low

    def level(self, block: int) -> int:
        """The level that is claimed for a block, else the default."""
        claim = self._claims.get(block)
        return DEFAULT_LEVEL if claim is None else claim[0]

    def make(self, block: int, level: int, expires_s: float) -> None:
        """Claim a level other than the default, if it beats what is claimed already."""
        claim = (level, expires_s)
        if claim <= self._claims.get(block, (-1, 0.0)):
            return
        self.drop(block)
        self._claims[block] = claim
        self._num_low += level < DEFAULT_LEVEL
        if len(self._ends) > 2 * len(self._claims) + 64:
            self._ends = [(until_s, there) for there, (_, until_s) in self._claims.items()]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (expires_s, block))

    def drop(self, block: int) -> None:
        """Nothing is claimed any more, if something was."""
        claim = self._claims.pop(block, None)
        if claim is not None:
            self._num_low -= claim[0] < DEFAULT_LEVEL

    def drop_low(self, blocks: Iterable[int]) -> None:
        """Somebody left these blocks who asked for nothing less than the default."""
        for block in blocks:
            if self.level(block) < DEFAULT_LEVEL:
                self.drop(block)

    def expire(self, now: float) -> list[int]:
        """Drop the claims whose time is up; their blocks."""
        ends, lapsed = self._ends, list[int]()
        while ends and ends[0][0] <= now:
            expires_s, block = heapq.heappop(ends)
            claim = self._claims.get(block)
            if claim is not None and claim[1] == expires_s:
                self.drop(block)
                lapsed.append(block)
        return lapsed

    def faults(self) -> Faults:
        """What is wrong with the account, piece by piece."""
        num_low, ends = 0, set[tuple[float, int]]()
        for known in pieces(self._ends):
            ends.update(known)
            yield ""
        for piece in pieces(self._claims.items()):
            num_low += sum(level < DEFAULT_LEVEL for _, (level, _) in piece)
            if any((until_s, block) not in ends for block, (_, until_s) in piece):
                yield "a claim never ends"
            if any(level == DEFAULT_LEVEL for _, (level, _) in piece):
                yield "a claim asks for nothing"
            yield ""
        if num_low != self._num_low:
            yield "low claims are miscounted"
