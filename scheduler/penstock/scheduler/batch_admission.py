"""Admits waiting requests, in order, and backfills past one that does not fit.

Owns the check whether a request fits, and how long a large request may be overtaken. Does not know
the order.

When the first request in order lacks blocks, later ones are tried: up to `max_lookahead` in a step,
at most four of one tenant. **Bound.** From the moment a request first is at the head and lacks
blocks, at most `max_num_overtakes` requests overtake it, and none more than `max_overtake_s` later.
Then all blocks that become free are kept for it: no other request is admitted while it is at the
head, so running requests end one by one until it fits (a request that does not fit alone is refused
at submission). The count is kept while other requests are at the head. A preempted request is not
overtaken at all: running requests lacked blocks, and another one would lack them next.

Requests of tenants under their fair share (fair_share.py) come first, and other requests are
preempted to free what they lack (victims.py). They too overtake a blocked request within the bound
above. For them the bound also covers a preempted request: while others are preempted for them, they
do not take the blocks that it waits for.
"""

from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig, SchedulingOrder
from penstock.scheduler.deadline_predictor import DeadlinePredictor
from penstock.scheduler.events import WaitReason
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.token_budget import TokenBudget
from penstock.scheduler.transitions import Transitions
from penstock.scheduler.victims import Shortage, VictimSelection
from penstock.scheduler.waiting_queue import WaitingQueue


class BatchAdmission:
    """Admits waiting requests while slots, blocks and budget last."""

    def __init__(  # noqa: PLR0913 - each is one thing that an admission takes from
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        *,
        cache: KVCache,
        running: RunningSet,
        queue: WaitingQueue,
        sizing: StepSizing,
        predictor: DeadlinePredictor,
        victims: VictimSelection,
        transitions: Transitions,
    ) -> None:
        self._info = info
        self._cache = cache
        self._running = running
        self._queue = queue
        self._order = queue.order
        self._sizing = sizing
        self._predictor = predictor
        self._victims = victims
        self._transitions = transitions
        self._is_guaranteed = config.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
        # A reservation of max_tokens needs no slack; taking only what is needed now does.
        self._watermark_blocks = (
            0 if self._is_guaranteed else -int(-config.watermark * info.num_blocks // 1)
        )
        self._takes_whole_prompts = info.is_self_paced
        # TensorRT-LLM does not count reusable blocks at admission, so a request admitted here would
        # wait there (getRemainingBlocksToCompletion; until NVIDIA PR #11637).
        self._counts_no_reuse = info.is_self_paced and self._is_guaranteed
        self._max_lookahead = config.max_lookahead if config.order is SchedulingOrder.FAIR else 0
        self._max_num_overtakes = config.max_num_overtakes
        self._max_overtake_s = config.max_overtake_s
        # TensorRT-LLM manages its own memory.
        self._may_preempt = not (self._is_guaranteed or info.is_self_paced)
        self._blocked: Request | None = None
        # The queue and the free blocks at the last unsuccessful search behind the head.
        self._last_scan_version = -1
        self._last_scan_blocks = 0

    def admit(self, budget: TokenBudget, now: float) -> WaitReason | None:
        """Give slots and tokens of `budget` to waiting requests.

        Return what the next request in the queue lacked, None if no admissible request is left.
        """
        order = self._order
        blocked: Request | None = None
        is_too_long = False
        num_passed = 0
        while budget.num_left > 0 and self._has_place:
            request = order.peek(now)
            if request is None:
                break
            reserve_tokens = self._reserve_tokens(request)
            matched = self._match(request, reserve_tokens, is_first=blocked is None)
            if matched is None:
                blocked = blocked or request
                num_passed += 1
                # A preempted request is not overtaken even if it is not at the head.
                if (
                    request.num_preemptions
                    or num_passed > self._max_lookahead
                    or not self._may_be_passed(blocked, now)
                ):
                    break
                order.pass_over(request)
                continue
            rejection = self._predictor.check_at_admission(request, matched, now)
            if rejection is not None:
                self._transitions.fail(request, rejection, now)
                continue
            is_past = blocked is not None
            is_too_long = not self._admit(
                request, matched, reserve_tokens, budget, now, is_past_blocked=is_past
            )
            if is_too_long:
                break
            if blocked is not None:
                blocked.num_overtaken += 1
                if not self._may_be_passed(blocked, now):
                    break
        self._blocked = blocked
        if num_passed:
            order.end_round()
            self._last_scan_version, self._last_scan_blocks = (
                self._queue.version,
                self._num_blocks_left(),
            )
            return WaitReason.BLOCKS
        return self._lack(budget, is_too_long=is_too_long)

    def admit_under_share(
        self,
        budget: TokenBudget,
        shares: FairShare,
        least: float,
        preempted: list[tuple[int, int]],
        now: float,
    ) -> bool:
        """Admit requests of tenants under their share, and update `shares`.

        If there is not enough room, preempt running requests of other tenants (see victims.py);
        return whether any was preempted. `least`: the lowest class to admit from. `preempted`:
        class and tenant of each request preempted so far in this step; requests of a lower class or
        of one of these tenants are not admitted.
        """
        least = max([least, *(level for level, _ in preempted)])
        barred = {tenant for _, tenant in preempted}
        order, cache = self._order, self._cache
        has_preempted = False
        while budget.num_left > 0:
            request = order.peek_in_turn(now)
            if request is None or request.spec.priority < least or request.tenant in barred:
                break
            reserve_tokens = self._reserve_tokens(request)
            num_blocks = cache.blocks_for(reserve_tokens)
            is_light = shares.is_light(request.tenant, num_slots=1, num_blocks=num_blocks)
            if not (is_light and self._may_pass_blocked(request, now)):
                break
            matched = self._match(request, reserve_tokens, is_first=True)
            if matched is None or not self._has_place:
                # No preemption for a request that would be late anyway.
                found = cache.match(request)
                if self._predictor.check_at_admission(request, found, now) is not None:
                    break
                if not self._make_place(request, num_blocks, budget, shares, now):
                    break
                has_preempted = True
                # Preempted requests are of no higher class than this one; no request behind is
                # before them.
                least = max(least, request.spec.priority)
                matched = self._match(request, reserve_tokens, is_first=True)
                if matched is None or not self._has_place:
                    break
            rejection = self._predictor.check_at_admission(request, matched, now)
            if rejection is not None:
                self._transitions.fail(request, rejection, now)
                continue
            is_past = self._blocked is not None and self._blocked is not request
            if self._blocked is not None and is_past:
                self._blocked.num_overtaken += 1
            self._admit(request, matched, reserve_tokens, budget, now, is_past_blocked=is_past)
            shares.take(request.tenant, num_blocks)
        return has_preempted

    @property
    def _has_place(self) -> bool:
        """Whether one more request may run: a slot is free, and the batch limit allows it."""
        running = self._running
        return running.has_free_slot and len(running) < self._sizing.max_num_running

    def _lack(self, budget: TokenBudget, *, is_too_long: bool) -> WaitReason | None:
        """Return why the remaining requests are not admitted, when none lacks blocks."""
        if not len(self._order):
            return None
        if not self._has_place:
            return WaitReason.SLOTS
        if is_too_long or budget.num_left <= 0:
            return WaitReason.TOKEN_BUDGET
        # The remaining ones belong to tenants at their running limit.
        return WaitReason.FAIRNESS

    def _may_pass_blocked(self, request: Request, now: float) -> bool:
        """Whether a request may overtake the request found blocked in the last round."""
        blocked = self._blocked
        if blocked is None or blocked is request or blocked.ticket < 0:
            self._blocked = None
            return True
        if blocked.blocked_since_s == NO_TIME:
            blocked.blocked_since_s = now
        is_in_time = now - blocked.blocked_since_s <= self._max_overtake_s
        return is_in_time and blocked.num_overtaken < self._max_num_overtakes

    def _make_place(
        self, request: Request, num_blocks: int, budget: TokenBudget, shares: FairShare, now: float
    ) -> bool:
        """Preempt requests for one of a tenant under its share; return False if that frees too
        little.
        """
        if not self._may_preempt or len(self._running) > self._sizing.max_num_running:
            return False
        shortage = Shortage(
            tenant=request.tenant,
            level=request.spec.priority,
            is_slot=not self._has_place,
            num_blocks_short=max(0, self._num_wanted(request) - self._num_blocks_left()),
            num_blocks=num_blocks,
            matched=tuple(self._cached(request)),
        )
        chosen = self._victims.choose_for_tenant(shares, shortage, budget.slots)
        for victim, _ in chosen:
            victim.num_tenant_preemptions += 1
            self._transitions.preempt(victim, now)
        return bool(chosen)

    def _admit(
        self,
        request: Request,
        matched: list[int],
        reserve_tokens: int,
        budget: TokenBudget,
        now: float,
        *,
        is_past_blocked: bool,
    ) -> bool:
        cache = self._cache
        start = len(matched) * cache.block_size
        remaining = len(request.tokens) - start
        # A prompt longer than a whole step is sent alone; the wrapped engine splits it.
        if self._takes_whole_prompts and remaining > budget.num_left and len(budget):
            return False
        count = budget.size(remaining)
        self._transitions.admit(
            request, matched, reserve_tokens, now, is_past_blocked=is_past_blocked
        )
        cache.extend(request.slot, cache.num_missing(request.slot, start + count))
        budget.add(request, start, count, remaining)
        return True

    def _match(self, request: Request, reserve_tokens: int, *, is_first: bool) -> list[int] | None:
        """Return the cached blocks of a request that fits, None for one that does not."""
        cache = self._cache
        num_left = self._num_blocks_left()
        # At least the last token's block is never cached. A request tried out of turn is not
        # matched again while fewer blocks are free than it needed the last time.
        if num_left < (1 if is_first else max(1, request.num_blocks_short)):
            return None
        matched = self._cached(request)
        counted = [] if self._counts_no_reuse else matched
        num_wanted = cache.num_taken(counted, reserve_tokens)
        if num_wanted <= num_left:
            return matched
        request.num_blocks_short = num_wanted
        return None

    def _cached(self, request: Request) -> list[int]:
        # Logprobs of the prompt need its logits, which a cached block does not have.
        wants_all = request.spec.sampling.num_prompt_logprobs >= 0
        return [] if wants_all else self._cache.match(request)

    def _num_wanted(self, request: Request) -> int:
        """Return the number of blocks that the admission of a request takes."""
        num_tokens = self._reserve_tokens(request)
        return self._cache.num_taken(self._cached(request), num_tokens)

    def _may_be_passed(self, blocked: Request, now: float) -> bool:
        if not self._max_lookahead or blocked.num_preemptions:
            return False
        if blocked.blocked_since_s == NO_TIME:
            blocked.blocked_since_s = now
        is_in_time = now - blocked.blocked_since_s <= self._max_overtake_s
        is_changed = (
            self._queue.version != self._last_scan_version
            or self._num_blocks_left() > self._last_scan_blocks
        )
        return is_in_time and blocked.num_overtaken < self._max_num_overtakes and is_changed

    def _num_blocks_left(self) -> int:
        """Return the number of blocks that are not used, reserved, or kept free."""
        cache = self._cache
        # A request that runs alone may take every block.
        spare_blocks = self._watermark_blocks if len(self._running) else 0
        return cache.num_available - cache.num_reserved - spare_blocks

    def _reserve_tokens(self, request: Request) -> int:
        # A constrained output may not be resumable: it gets the blocks it may need.
        if self._is_guaranteed or request.spec.constraint is not None:
            return self._info.num_kept_tokens(request.spec.max_total_tokens)
        return len(request.tokens)
