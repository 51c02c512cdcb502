"""Blocks of prompts that live requests are about to compute.

Owns the map from the first uncached block to the requests. Does not know which blocks have been
computed since: the cache is searched first.
"""

from collections.abc import Mapping
from itertools import islice

from penstock.scheduler.request import Request

MAX_LOOKED_AT = 32
"""Most requests checked per start block; of further ones, one is assumed to match."""


class LivePrefixes:
    """Prompts of live requests, by the digest of the first block that was not cached.

    Adding and removing cost the same for any prompt; the query does the work.
    """

    def __init__(self) -> None:
        self._begun_at: dict[bytes, dict[int, Request]] = {}
        self._first_of: dict[int, bytes] = {}

    def add(self, request: Request, num_matched: int) -> None:
        """Add a request whose first `num_matched` blocks are cached."""
        spec = request.spec
        if num_matched >= len(spec.block_hashes):
            return
        first = self._first_of[spec.key] = spec.block_hashes[num_matched]
        self._begun_at.setdefault(first, {})[spec.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that ends; a no-op if it was never added."""
        key = request.spec.key
        first = self._first_of.pop(key, None)
        if first is None:
            return
        begun = self._begun_at[first]
        del begun[key]
        if not begun:
            del self._begun_at[first]

    def is_wanted(self, request: Request, index: int) -> bool:
        """Whether another request may compute block `index` of this one's prompt.

        Only requests whose first block to compute is this one or an earlier one may.
        """
        hashes = request.spec.block_hashes
        return index < len(hashes) and any(
            self._goes_on(begun, request, index)
            for digest in hashes[: index + 1]
            if (begun := self._begun_at.get(digest)) is not None
        )

    def _goes_on(self, begun: dict[int, Request], request: Request, index: int) -> bool:
        """Whether one of `begun` has the same block at `index`."""
        key, digest = request.spec.key, request.spec.block_hashes[index]
        for other in islice(reversed(begun.values()), MAX_LOOKED_AT):
            hashes = other.spec.block_hashes
            if other.spec.key != key and index < len(hashes) and hashes[index] == digest:
                return True
        return len(begun) > MAX_LOOKED_AT

    def faults(self, live: Mapping[int, Request]) -> list[str]:
        """Return the inconsistencies."""
        begun = {key: first for first, each in self._begun_at.items() for key in each}
        found = [] if begun == self._first_of else ["live prefixes are miscounted"]
        if not begun.keys() <= live.keys():
            found.append("a request that ended still counts among the live prefixes")
        return found
