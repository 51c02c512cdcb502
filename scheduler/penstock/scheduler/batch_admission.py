"""Admits waiting requests, in order, and backfills past one that does not fit.

Owns what fits, and how long a huge request may be overtaken. Does not know the order.

When the first in order lacks blocks, those behind it are tried: up to `max_lookahead` in a step,
four of one tenant. **Bound.** From the moment it first was at the head and lacked blocks, at most
`max_num_overtakes` requests overtake it, and none later than `max_overtake_s` after it. Then all
blocks that become free are kept for it: no other request is admitted while it is first, so running
requests end one by one until it fits (alone it fits, or it was refused at submission). The count is
kept while others are first. A preempted request is not overtaken at all: running requests lacked
blocks, and another one would lack them next.

Requests of tenants under their fair share (fair_share.py) come first, and others are preempted for
what they lack (victims.py). They too overtake a blocked request within the bound above, which for
them also covers a preempted one: the blocks they take are not those it waits for, as long as others
are preempted.
"""

from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.events import WaitReason
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.token_budget import TokenBudget
from penstock.scheduler.victims import Shortage, choose_for_tenant


class BatchAdmission:
    """Admits requests of a `Lifecycle` while slots, blocks and budget last."""

    def __init__(self, life: Lifecycle, info: ExecutorInfo, config: SchedulerConfig) -> None:
        self._life = life
        self._info = info
        self._is_guaranteed = config.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
        # A reservation of max_tokens needs no slack; taking only what is needed now does.
        self._watermark_blocks = (
            0 if self._is_guaranteed else -int(-config.watermark * info.num_blocks // 1)
        )
        self._takes_whole_prompts = info.is_self_paced
        # TensorRT-LLM does not count reusable blocks at admission, so a request admitted here would
        # wait there (getRemainingBlocksToCompletion; until NVIDIA PR #11637).
        self._counts_no_reuse = info.is_self_paced and self._is_guaranteed
        self._max_lookahead = config.max_lookahead if life.is_fair else 0
        self._max_num_overtakes = config.max_num_overtakes
        self._max_overtake_s = config.max_overtake_s
        # TensorRT-LLM manages its own memory.
        self._may_yield = not (self._is_guaranteed or info.is_self_paced)
        self._blocked: Request | None = None
        # The queue and the free blocks at the last unsuccessful search behind the head.
        self._vain_version = -1
        self._vain_blocks = 0

    def admit(self, grants: TokenBudget, now: float) -> WaitReason | None:
        """Give slots and tokens of `grants` to waiting requests.

        Returns what the next in line lacked, None when no admissible request is left.
        """
        life, queue = self._life, self._life.queue
        blocked: Request | None = None
        is_too_long = False
        num_passed = 0
        while grants.budget_tokens > 0 and life.has_place:
            request = queue.peek(now)
            if request is None:
                break
            reserve_tokens = self._reserve_tokens(request)
            matched = self._match(request, reserve_tokens, is_first=blocked is None)
            if matched is None:
                blocked = blocked or request
                num_passed += 1
                # Behind the head, too, no request overtakes a preempted one.
                if (
                    request.num_preemptions
                    or num_passed > self._max_lookahead
                    or not self._may_be_passed(blocked, now)
                ):
                    break
                queue.order.pass_over(request)
                continue
            verdict = life.outlook.verdict_at_admission(request, matched, now)
            if verdict is not None:
                life.drop(request, verdict, now)
                continue
            is_past = blocked is not None
            is_too_long = not self._let_in(
                request, matched, reserve_tokens, grants, now, is_past_blocked=is_past
            )
            if is_too_long:
                break
            if blocked is not None:
                blocked.num_overtaken += 1
                if not self._may_be_passed(blocked, now):
                    break
        self._blocked = blocked
        if num_passed:
            queue.order.end_round()
            self._vain_version, self._vain_blocks = queue.version, self._num_blocks_left()
            return WaitReason.BLOCKS
        return self._lack(grants, is_too_long=is_too_long)

    def admit_light(
        self,
        grants: TokenBudget,
        shares: FairShare,
        least: float,
        thrown_out: list[tuple[int, int]],
        now: float,
    ) -> bool:
        """As `admit`, for requests of tenants under their share, updating `shares`.

        Running requests of others are preempted for what they lack (victims.py); returns whether
        that happened. `least`: the lowest class that may be preempted. `thrown_out`: classes and
        tenants of requests already preempted in this step: a new request is of no lower class, and
        of another tenant.
        """
        least = max([least, *(level for level, _ in thrown_out)])
        barred = {tenant for _, tenant in thrown_out}
        life, order = self._life, self._life.queue.order
        has_preempted = False
        while grants.budget_tokens > 0:
            request = order.peek_in_turn(now)
            if request is None or request.spec.priority < least or request.tenant in barred:
                break
            reserve_tokens = self._reserve_tokens(request)
            num_blocks = life.cache.blocks_for(reserve_tokens)
            is_light = shares.is_light(request.tenant, num_slots=1, num_blocks=num_blocks)
            if not (is_light and self._may_pass_blocked(request, now)):
                break
            matched = self._match(request, reserve_tokens, is_first=True)
            if matched is None or not life.has_place:
                # No preemption for a request that would be late anyway.
                found = life.cache.match(request)
                if life.outlook.verdict_at_admission(request, found, now) is not None:
                    break
                if not self._make_place(request, num_blocks, grants, shares, now):
                    break
                has_preempted = True
                # Preempted requests are of no higher class than this one; no request behind is
                # before them.
                least = max(least, request.spec.priority)
                matched = self._match(request, reserve_tokens, is_first=True)
                if matched is None or not life.has_place:
                    break
            verdict = life.outlook.verdict_at_admission(request, matched, now)
            if verdict is not None:
                life.drop(request, verdict, now)
                continue
            is_past = self._blocked is not None and self._blocked is not request
            if self._blocked is not None and is_past:
                self._blocked.num_overtaken += 1
            self._let_in(request, matched, reserve_tokens, grants, now, is_past_blocked=is_past)
            shares.take(request.tenant, num_blocks)
        return has_preempted

    def _lack(self, grants: TokenBudget, *, is_too_long: bool) -> WaitReason | None:
        """What the remaining requests in the order lack, when none lacks blocks."""
        life = self._life
        if not len(life.queue.order):
            return None
        if not life.has_place:
            return WaitReason.SLOTS
        if is_too_long or grants.budget_tokens <= 0:
            return WaitReason.TOKEN_BUDGET
        # The remaining ones belong to tenants at their running limit.
        return WaitReason.FAIRNESS

    def _may_pass_blocked(self, request: Request, now: float) -> bool:
        """Whether a request may overtake the one found blocked in the last round."""
        blocked = self._blocked
        if blocked is None or blocked is request or blocked.ticket < 0:
            self._blocked = None
            return True
        if blocked.blocked_since_s == NO_TIME:
            blocked.blocked_since_s = now
        is_in_time = now - blocked.blocked_since_s <= self._max_overtake_s
        return is_in_time and blocked.num_overtaken < self._max_num_overtakes

    def _make_place(
        self, request: Request, num_blocks: int, grants: TokenBudget, shares: FairShare, now: float
    ) -> bool:
        """Preempt requests for one of a tenant under its share; False when they do not suffice."""
        life = self._life
        if not self._may_yield or len(life.running) > life.outlook.pace.max_num_running:
            return False
        lack = Shortage(
            tenant=request.tenant,
            level=request.spec.priority,
            is_slot=not life.has_place,
            num_blocks_short=max(0, self._num_wanted(request) - self._num_blocks_left()),
            num_blocks=num_blocks,
            matched=tuple(self._cached(request)),
        )
        yielders = choose_for_tenant(life, shares, lack, grants.slots)
        for yielder, _ in yielders:
            yielder.num_yields += 1
            life.preempt(yielder, now)
        return bool(yielders)

    def _let_in(
        self,
        request: Request,
        matched: list[int],
        reserve_tokens: int,
        grants: TokenBudget,
        now: float,
        *,
        is_past_blocked: bool,
    ) -> bool:
        cache = self._life.cache
        start = len(matched) * cache.block_size
        remaining = len(request.tokens) - start
        # Longer than a whole step: alone, for the engine behind to split into chunks.
        if self._takes_whole_prompts and remaining > grants.budget_tokens and len(grants):
            return False
        count = grants.size(remaining)
        self._life.admit(request, matched, reserve_tokens, now, is_past_blocked=is_past_blocked)
        cache.extend(request.slot, cache.num_missing(request.slot, start + count))
        grants.add(request, start, count, remaining)
        return True

    def _match(self, request: Request, reserve_tokens: int, *, is_first: bool) -> list[int] | None:
        """Cached blocks of a request that fits, None for one that does not."""
        cache = self._life.cache
        num_left = self._num_blocks_left()
        # At least the last token's block is never cached. A request tried out of turn is not
        # matched again while fewer blocks are free than it wanted the last time.
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
        return [] if wants_all else self._life.cache.match(request)

    def _num_wanted(self, request: Request) -> int:
        """Blocks that the admission of a request takes."""
        num_tokens = self._reserve_tokens(request)
        return self._life.cache.num_taken(self._cached(request), num_tokens)

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
        """Blocks that are not used, reserved, or kept free."""
        life, cache = self._life, self._life.cache
        # Alone, a request may take everything.
        spare_blocks = self._watermark_blocks if len(life.running) else 0
        return cache.pool.num_available - cache.num_reserved - spare_blocks

    def _reserve_tokens(self, request: Request) -> int:
        # A constrained output may not be resumable: it gets the blocks it may need.
        if self._is_guaranteed or request.spec.constraint is not None:
            return self._info.num_kept_tokens(request.spec.max_total_tokens)
        return len(request.tokens)
