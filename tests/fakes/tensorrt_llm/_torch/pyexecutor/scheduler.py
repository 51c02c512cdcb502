"""Selects the requests of a step: by free pages first, then by the step's token budget.

It implements both admission policies and allocates the pages. It does not depend on token values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorrt_llm._torch.pyexecutor.kv_cache_manager import KvCacheManager, block_keys
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest

if TYPE_CHECKING:
    from tensorrt_llm.llmapi.llm import EngineLimits


@dataclass(slots=True)
class Scheduled:
    """The requests of one step, each with the number of tokens that it computes. `has_paused`: a
    request was preempted for this step.
    """

    context: list[tuple[LlmRequest, int]] = field(default_factory=list)
    generation: list[tuple[LlmRequest, int]] = field(default_factory=list)
    has_paused: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.context or self.generation)


class StepScheduler:
    def __init__(self, pool: KvCacheManager, limits: EngineLimits) -> None:
        self._pool = pool
        self._limits = limits

    def schedule(self, active: Iterable[LlmRequest]) -> Scheduled:
        """Choose requests in the order of activation, and allocate the pages that the
        step needs.
        """
        requests = list(active)
        step = Scheduled()
        for request in requests:
            if request.is_prefilled:
                self._decode(request, requests, step)
        budget = self._limits.max_num_tokens - sum(count for _, count in step.generation)
        free = self._pool.num_free - self._promised(requests)
        for request in requests:
            if request.is_prefilled:
                continue
            if not request.blocks:
                free -= self._needed(request)
                if free < 0 or step.has_paused:
                    break
            count = self._chunk(request, budget)
            if count == 0:
                break
            if not request.blocks:
                self._start(request)
                count = min(count, request.num_tokens_to_compute)
            step.context.append((request, count))
            budget -= count
        return step

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.tokens_per_block)

    def _decode(self, request: LlmRequest, requests: list[LlmRequest], step: Scheduled) -> None:
        count = 1
        if self._limits.max_draft_len:
            left = request.max_tokens - len(request.generated)
            count = min(left, 1 + request.state % (1 + self._limits.max_draft_len))
        missing = self._num_blocks(request.num_computed + count) - len(request.blocks)
        while missing > self._pool.num_free and request.blocks:
            # The latest request is paused first, even if it is this one.
            victim = next(other for other in reversed(requests) if other.blocks)
            self._pause(victim)
            step.has_paused = True
            step.generation = [entry for entry in step.generation if entry[0] is not victim]
        if request.blocks:
            request.blocks += self._pool.take(max(0, missing))
            step.generation.append((request, count))

    def _pause(self, request: LlmRequest) -> None:
        self._pool.release(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.num_stored = 0

    def _promised(self, requests: list[LlmRequest]) -> int:
        """Return how many more pages the running requests may need; 0 if the policy may preempt."""
        if self._limits.may_pause:
            return 0
        return sum(
            max(0, self._num_blocks(len(request.prompt) + request.max_tokens) - len(request.blocks))
            for request in requests
            if request.blocks
        )

    def _needed(self, request: LlmRequest) -> int:
        """Return how many free pages admitting the request takes."""
        if self._limits.is_reusing and not request.block_keys:
            # The last token is always computed, for its logits.
            request.block_keys = block_keys(
                request.reuse_root, request.prompt[:-1], self._pool.tokens_per_block
            )
        if not self._limits.may_pause:
            # All pages count: this release gives no credit for reusable pages before a request
            # has begun (NVIDIA PR #11637 added that).
            return self._num_blocks(len(request.prompt) + request.max_tokens)
        found = self._pool.match(request.block_keys)
        length = len(request.prompt) + len(request.generated)
        return self._num_blocks(length) - len(found) + self._pool.num_unheld(found)

    def _chunk(self, request: LlmRequest, budget: int) -> int:
        """Return how many tokens to compute now: all that are left if they fit into `budget`,
        otherwise the largest number of whole pages that fits.
        """
        left = request.num_tokens_to_compute
        if not request.blocks:
            left -= len(self._pool.match(request.block_keys)) * self._pool.tokens_per_block
        if left <= budget:
            return left
        return budget - budget % min(self._pool.tokens_per_block, self._limits.max_num_tokens)

    def _start(self, request: LlmRequest) -> None:
        found = self._pool.match(request.block_keys)
        self._pool.hold(found)
        request.num_computed = len(found) * self._pool.tokens_per_block
        request.num_stored = len(found)
        if not request.generated:
            request.cached_tokens = request.num_computed
        length = len(request.prompt) + len(request.generated)
        request.blocks = found + self._pool.take(self._num_blocks(length) - len(found))
