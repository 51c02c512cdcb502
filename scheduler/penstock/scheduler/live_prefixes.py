"""Which blocks of prompts somebody who lives has yet to compute.

Owns a count per digest of the blocks that were not cached when their request joined. Does not know
which of them have been computed since: those are found in the cache first.
"""

from collections import Counter

from penstock.scheduler.request import Request


class LivePrefixes:
    """Digests of the prompts of live requests."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._first_of: dict[int, int] = {}

    def add(self, request: Request, num_matched: int) -> None:
        """A request joins whose first `num_matched` blocks are cached."""
        self._first_of[request.spec.key] = num_matched
        self._counts.update(request.spec.block_hashes[num_matched:])

    def remove(self, request: Request) -> None:
        """A request ends; nothing happens when it never joined."""
        first = self._first_of.pop(request.spec.key, None)
        if first is None:
            return
        counts = self._counts
        for digest in request.spec.block_hashes[first:]:
            count = counts.pop(digest)
            if count > 1:
                counts[digest] = count - 1

    def is_wanted(self, request: Request, index: int) -> bool:
        """Whether another request may come to compute block `index` of this one's prompt."""
        hashes = request.spec.block_hashes
        if index >= len(hashes):
            return False
        num_own = int(self._first_of.get(request.spec.key, len(hashes)) <= index)
        return self._counts.get(hashes[index], 0) > num_own

    def faults(self, live: dict[int, Request]) -> list[str]:
        """What does not add up; empty when all is well."""
        expected: dict[bytes, int] = {}
        for key, first in self._first_of.items():
            if key not in live:
                return ["a request that ended still counts among the live prefixes"]
            for digest in live[key].spec.block_hashes[first:]:
                expected[digest] = expected.get(digest, 0) + 1
        return [] if expected == self._counts else ["live prefixes are miscounted"]
