"""Records which prompt blocks live requests are about to compute.

Maps the first uncached block of a prompt to the requests that start there. Does not record which
blocks have been computed since: callers search the cache first.
"""

from collections.abc import Mapping
from itertools import islice

from penstock.scheduler.request import Request

MAX_EXAMINED = 32
"""Maximum number of requests checked per start block. If there are more, one of the others is
assumed to have the block.
"""


class LivePrefixes:
    """Prompts of live requests, by the digest of the first block that was not cached.

    Adding and removing take constant time; a query takes longer.
    """

    def __init__(self) -> None:
        self._starting_at: dict[bytes, dict[int, Request]] = {}
        self._first_of: dict[int, bytes] = {}

    def add(self, request: Request, num_matched: int) -> None:
        """Add a request; the first `num_matched` blocks of its prompt are cached. A no-op if all
        are.
        """
        spec = request.spec
        if num_matched >= len(spec.block_hashes):
            return
        first = self._first_of[spec.key] = spec.block_hashes[num_matched]
        self._starting_at.setdefault(first, {})[spec.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that ends; a no-op if it was never added."""
        key = request.spec.key
        first = self._first_of.pop(key, None)
        if first is None:
            return
        starting = self._starting_at[first]
        del starting[key]
        if not starting:
            del self._starting_at[first]

    def may_be_computed(self, request: Request, index: int) -> bool:
        """Return whether another live request may compute block `index` of this request's prompt
        first.

        This request can then reuse the block. Considers only requests whose first uncached block is
        this block or an earlier one.
        """
        if request.spec.sampling.needs_whole_prompt:
            return False
        hashes = request.spec.block_hashes
        return index < len(hashes) and any(
            self._has_block(starting, request, index)
            for digest in hashes[: index + 1]
            if (starting := self._starting_at.get(digest)) is not None
        )

    def _has_block(self, starting: dict[int, Request], request: Request, index: int) -> bool:
        """Return whether another of the `starting` requests has the same digest at `index` of its
        prompt. If none of the last MAX_EXAMINED has, but there are more, return True.
        """
        key, digest = request.spec.key, request.spec.block_hashes[index]
        for other in islice(reversed(starting.values()), MAX_EXAMINED):
            hashes = other.spec.block_hashes
            if other.spec.key != key and index < len(hashes) and hashes[index] == digest:
                return True
        return len(starting) > MAX_EXAMINED

    def faults(self, live: Mapping[int, Request]) -> list[str]:
        """Return the inconsistencies of this index, given the live requests."""
        starting = {key: first for first, each in self._starting_at.items() for key in each}
        found = [] if starting == self._first_of else ["live prefixes are miscounted"]
        if not starting.keys() <= live.keys():
            found.append("a request that has ended is still in the index of live prefixes")
        return found
