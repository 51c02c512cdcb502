"""Lets waiting requests in, in order, and past one that does not fit.

Owns what fits, and how long a huge request may be passed. Does not know the order.

When the first in order lacks blocks, those behind it are tried: up to `max_lookahead` in a step,
four of one tenant. **Bound.** From the moment it first stood at the head and lacked blocks, at most
`max_num_overtakes` requests pass it, and none later than `max_overtake_s` after it. Then whatever
comes free waits for it: nobody is admitted while it is first, so those who run end one by one until
it fits (alone it fits, or it was refused at the door). The count is kept while others are first.
Whom a preemption threw out is not passed at all: blocks are what running requests lacked, and
somebody new would lack them next.
"""

from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.grants import Grants
from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.request import NO_TIME, Request


class Admissions:
    """Admits requests of a `Lifecycle` while slots, blocks and budget last."""

    def __init__(self, life: Lifecycle, info: ExecutorInfo, config: SchedulerConfig) -> None:
        self._life = life
        self._info = info
        self._is_guaranteed = config.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
        # A reservation to max_tokens needs no slack; taking what is needed now does.
        self._watermark_blocks = (
            0 if self._is_guaranteed else -int(-config.watermark * info.num_blocks // 1)
        )
        self._takes_whole_prompts = info.is_self_paced
        # TensorRT-LLM lets nobody in on the strength of blocks to be reused, so who was let in here
        # would wait there (getRemainingBlocksToCompletion; until NVIDIA PR #11637).
        self._counts_no_reuse = info.is_self_paced and self._is_guaranteed
        self._max_lookahead = config.max_lookahead if life.is_fair else 0
        self._max_num_overtakes = config.max_num_overtakes
        self._max_overtake_s = config.max_overtake_s
        # The queue and the blocks there were when looking behind the head was last in vain.
        self._vain_version = -1
        self._vain_blocks = 0

    def admit(self, grants: Grants, now: float) -> None:
        """Give slots and tokens of `grants` to waiting requests."""
        life, queue = self._life, self._life.queue
        blocked: Request | None = None
        num_passed = 0
        while grants.budget_tokens > 0 and life.running.has_free_slot:
            request = queue.peek(now)
            if request is None:
                break
            reserve_tokens = self._reserve_tokens(request)
            matched = self._match(request, reserve_tokens, is_first=blocked is None)
            if matched is None:
                blocked = blocked or request
                num_passed += 1
                if num_passed > self._max_lookahead or not self._may_be_passed(blocked, now):
                    break
                queue.order.pass_over(request)
                continue
            if not self._let_in(request, matched, reserve_tokens, grants, now):
                break
            if blocked is not None:
                blocked.num_overtaken += 1
                if not self._may_be_passed(blocked, now):
                    break
        if num_passed:
            queue.order.end_round()
            self._vain_version, self._vain_blocks = queue.version, self._num_blocks_left()

    def _let_in(
        self, request: Request, matched: list[int], reserve_tokens: int, grants: Grants, now: float
    ) -> bool:
        cache = self._life.cache
        start = len(matched) * cache.block_size
        remaining = len(request.tokens) - start
        # Longer than a whole step: alone, for the engine behind to cut into chunks.
        if self._takes_whole_prompts and remaining > grants.budget_tokens and len(grants):
            return False
        count = grants.size(remaining)
        self._life.admit(request, matched, reserve_tokens, now)
        cache.extend(request.slot, cache.num_missing(request.slot, start + count))
        grants.add(request, start, count, remaining)
        return True

    def _match(self, request: Request, reserve_tokens: int, *, is_first: bool) -> list[int] | None:
        """Cached blocks of a request that fits, None for one that does not."""
        cache = self._life.cache
        num_left = self._num_blocks_left()
        # At least the last token's block is never cached. Who is tried out of turn is not matched
        # anew while there is less than was wanted the last time.
        if num_left < (1 if is_first else max(1, request.num_blocks_short)):
            return None
        # Logprobs of the prompt need its logits, which a cached block does not have.
        wants_all = request.spec.sampling.num_prompt_logprobs >= 0
        matched = [] if wants_all else cache.match(request)
        counted = [] if self._counts_no_reuse else matched
        num_wanted = cache.num_taken(counted, reserve_tokens)
        if num_wanted <= num_left:
            return matched
        request.num_blocks_short = num_wanted
        return None

    def _may_be_passed(self, blocked: Request, now: float) -> bool:
        if not self._max_lookahead or blocked.num_preemptions:
            return False
        if blocked.blocked_since_s == NO_TIME:
            blocked.blocked_since_s = now
        is_in_time = now - blocked.blocked_since_s <= self._max_overtake_s
        is_news = (
            self._life.queue.version != self._vain_version
            or self._num_blocks_left() > self._vain_blocks
        )
        return is_in_time and blocked.num_overtaken < self._max_num_overtakes and is_news

    def _num_blocks_left(self) -> int:
        """Blocks that nobody holds, was promised, or must leave free."""
        life, cache = self._life, self._life.cache
        # Alone, a request may take everything.
        spare_blocks = self._watermark_blocks if len(life.running) else 0
        return cache.pool.num_available - cache.num_reserved - spare_blocks

    def _reserve_tokens(self, request: Request) -> int:
        # Whose output has a form may not be resumable: it gets what it may need.
        if self._is_guaranteed or request.spec.constraint is not None:
            return self._info.num_kept_tokens(request.spec.max_total_tokens)
        return len(request.tokens)
