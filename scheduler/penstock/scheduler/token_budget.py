"""Prefill tokens granted in a step that is being planned.

Owns how the budget is split among prompts. Does not know which requests may run.

One long prompt must not take whole steps while short ones wait behind it: a prompt that does not
end in this step takes at most a share of the remaining budget. At the end, the budget that later
prompts did not need goes to the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import Chunk
from penstock.scheduler.request import Request

MIN_SHARE = 0.125
"""Minimum chunk of a longer prompt, as a share of the whole prefill budget of a step.

With the usual half, a prompt behind one, two, three long ones finds a half, a quarter, an eighth of
the step's budget left; behind more than three it waits until one of them is done.
"""


@dataclass(slots=True, eq=False)
class _Grant:
    request: Request
    start: int
    count: int
    remaining: int


class TokenBudget:
    """The remaining budget, and the grants.

    `max_share`: the part of the remaining budget that one prompt may take at first. `is_whole`:
    prompts are taken whole, beyond the budget if necessary.
    """

    def __init__(self, budget_tokens: int, *, max_share: float, is_whole: bool) -> None:
        self.num_left = budget_tokens
        self._max_share = max_share
        self._is_whole = is_whole
        self._min_tokens = max(1, int(budget_tokens * MIN_SHARE))
        self._grants: list[_Grant] = []

    def __len__(self) -> int:
        return len(self._grants)

    @property
    def slots(self) -> set[int]:
        """Slots that got tokens."""
        return {grant.request.slot for grant in self._grants}

    @property
    def requests(self) -> list[Request]:
        """The requests that got tokens."""
        return [grant.request for grant in self._grants]

    @property
    def ends_any(self) -> bool:
        """Whether a prompt ends in this step."""
        return any(grant.count == grant.remaining for grant in self._grants)

    def size(self, num_remaining: int, *, is_shared: bool = True) -> int:
        """Return how many tokens a prompt with `num_remaining` to compute gets now."""
        if self._is_whole or num_remaining <= self.num_left:
            return num_remaining
        if not is_shared:
            return self.num_left
        most = max(int(self.num_left * self._max_share), self._min_tokens)
        return min(most, self.num_left)

    def add(self, request: Request, start: int, count: int, num_remaining: int) -> None:
        """Grant `count` of `num_remaining` tokens from position `start` on; blocks are
        allocated.
        """
        self._grants.append(_Grant(request, start, count, num_remaining))
        self.num_left -= count

    def top_up(self, cache: KVCache) -> None:
        """Grant the remaining budget, first come first served, as far as blocks are free."""
        for grant in self._grants:
            if self.num_left <= 0:
                return
            more = min(grant.remaining - grant.count, self.num_left)
            missing = cache.num_missing(grant.request.slot, grant.start + grant.count + more)
            if more <= 0 or missing > cache.num_available:
                continue
            if missing:
                cache.extend(grant.request.slot, missing)
            grant.count += more
            self.num_left -= more

    def chunks(self) -> Iterator[Chunk]:
        """Return the prefill rows, in order."""
        for grant in self._grants:
            is_done = grant.count == grant.remaining
            yield Chunk(grant.request, grant.request.slot, grant.start, grant.count, is_done)
