"""Splits the prefill token budget of a planned step among the prompts.

Which requests may run is decided elsewhere.

A long prompt must not take whole steps while short ones wait behind it. So a prompt that does not
end in this step takes at most a fraction of the remaining budget. Finally, budget that later
prompts did not need goes to the earlier prompts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.request import Request

MIN_SHARE = 0.125
"""Minimum chunk of a longer prompt, as a share of the whole prefill budget of a step.

With `max_share` 0.5, a prompt behind one, two or three long prompts has a half, a quarter or an
eighth of the step's budget available; behind more than three it waits until one of them is done.
"""


@dataclass(slots=True, eq=False)
class _Grant:
    request: Request
    start: int
    count: int
    remaining: int


class TokenBudget:
    """The remaining budget of a step, and the tokens granted to each prompt.

    `max_share`: the fraction of the remaining budget that one prompt may take at first, but at
    least `MIN_SHARE` of the whole. `is_whole`: prompts are not split, even if they exceed the
    budget.
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
        """The slots that got tokens in this step."""
        return {grant.request.slot for grant in self._grants}

    @property
    def requests(self) -> list[Request]:
        """The requests that got tokens in this step."""
        return [grant.request for grant in self._grants]

    @property
    def ends_any(self) -> bool:
        """Whether this step computes the last token of any prompt."""
        return any(grant.count == grant.remaining for grant in self._grants)

    def size(self, num_remaining: int, *, is_shared: bool = True) -> int:
        """Return how many tokens to grant to a prompt with `num_remaining` tokens to compute.
        `is_shared`: a prompt that does not end in this step leaves a part of the budget to others.
        """
        if self._is_whole or num_remaining <= self.num_left:
            return num_remaining
        if not is_shared:
            return self.num_left
        most = max(int(self.num_left * self._max_share), self._min_tokens)
        return min(most, self.num_left)

    def add(self, request: Request, start: int, count: int, num_remaining: int) -> None:
        """Grant `count` of `num_remaining` tokens from position `start` on; their blocks must be
        allocated.
        """
        self._grants.append(_Grant(request, start, count, num_remaining))
        self.num_left -= count

    def top_up(self, cache: KVCache) -> None:
        """Grant the remaining budget to the prompts in order, as far as blocks are available."""
        for grant in self._grants:
            if self.num_left <= 0:
                return
            more = min(grant.remaining - grant.count, self.num_left)
            missing = cache.num_missing(grant.request.slot, grant.start + grant.count + more)
            if more <= 0 or missing > cache.pool.num_available:
                continue
            if missing:
                cache.extend(grant.request.slot, missing)
            grant.count += more
            self.num_left -= more

    def chunks(self) -> Iterator[PrefillChunk]:
        """Yield the prefill rows, in order."""
        for grant in self._grants:
            is_done = grant.count == grant.remaining
            yield PrefillChunk(grant.request, grant.request.slot, grant.start, grant.count, is_done)
