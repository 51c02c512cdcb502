"""Admits waiting requests in queue order, and backfills past one that does not fit.

Checks whether a request fits, and bounds how long a large request may be overtaken. The queue order
(`queue_order.py`) and the number of blocks of an admission (`admission_blocks.py`) are defined
elsewhere.

When the first request in order lacks blocks, later ones are tried: up to `max_lookahead` in a step,
at most four of one tenant. **Bound.** Once a request is at the head and lacks blocks, at most
`max_num_overtakes` requests overtake it, and only within the next `max_overtake_s` seconds. After
that, all blocks that become free are kept for it: no other request is admitted while it is at the
head, so running requests end one by one until it fits (a request that does not fit even alone is
rejected at submission). The count does not restart when another request moves to the head. A
preempted request is not overtaken in this way: it was preempted because blocks ran out, and
admitting another request would make them run out again.

Requests of tenants under their fair share (fair_share.py) come first, and other requests are
preempted to free the slots and blocks that they need (victims.py). They may overtake a blocked
request, even a preempted one, but only within the bound above. After that, they do not take the
blocks that it waits for.
"""

from penstock.scheduler.admission_blocks import AdmissionBlocks
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
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
    """Admits waiting requests while slots, blocks and token budget are available."""

    def __init__(  # noqa: PLR0913 - each is one thing that an admission takes from
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        *,
        cache: KVCache,
        blocks: AdmissionBlocks,
        running: RunningSet,
        queue: WaitingQueue,
        sizing: StepSizing,
        predictor: DeadlinePredictor,
        victims: VictimSelection,
        transitions: Transitions,
    ) -> None:
        self._cache = cache
        self._blocks = blocks
        self._running = running
        self._queue = queue
        self._order = queue.order
        self._sizing = sizing
        self._predictor = predictor
        self._victims = victims
        self._transitions = transitions
        self._sends_whole_prompts = info.is_self_paced
        self._max_lookahead = config.max_lookahead if config.order is SchedulingOrder.FAIR else 0
        self._max_num_overtakes = config.max_num_overtakes
        self._max_overtake_s = config.max_overtake_s
        self._blocked: Request | None = None
        # The queue version and the number of free blocks at the last unsuccessful backfill search.
        self._last_scan_version = -1
        self._last_scan_blocks = 0

    def admit(self, budget: TokenBudget, now: float) -> WaitReason | None:
        """Give slots and tokens of `budget` to waiting requests.

        Return why the first request left in the queue order was not admitted; None if no request
        is left.
        """
        order = self._order
        blocked: Request | None = None
        is_too_long = False
        num_skipped = 0
        while budget.num_left > 0 and self._has_free_slot:
            request = order.peek(now)
            if request is None:
                break
            matched = self._match(request, is_first=blocked is None)
            if matched is None:
                blocked = blocked or request
                num_skipped += 1
                # A preempted request is not overtaken even if it is not at the head.
                if (
                    request.num_preemptions
                    or num_skipped > self._max_lookahead
                    or not self._may_be_overtaken(blocked, now)
                ):
                    break
                order.skip(request)
                continue
            rejection = self._predictor.check_at_admission(request, matched, now)
            if rejection is not None:
                self._transitions.fail(request, rejection, now)
                continue
            is_past = blocked is not None
            is_too_long = not self._admit(request, matched, budget, now, is_past_blocked=is_past)
            if is_too_long:
                break
            if blocked is not None:
                blocked.num_overtaken += 1
                if not self._may_be_overtaken(blocked, now):
                    break
        self._blocked = blocked
        if num_skipped:
            order.end_round()
            self._last_scan_version, self._last_scan_blocks = (
                self._queue.version,
                self._blocks.num_left,
            )
            return WaitReason.BLOCKS
        return self._wait_reason(budget, is_too_long=is_too_long)

    def admit_under_share(
        self,
        budget: TokenBudget,
        shares: FairShare,
        min_priority: float,
        preempted: list[tuple[int, int]],
        now: float,
    ) -> bool:
        """Admit requests of tenants under their share, and update `shares`.

        If slots or blocks are short, preempt running requests of other tenants (victims.py). Return
        whether a request was preempted. `min_priority`: the lowest priority class to admit from.
        `preempted`: class and tenant of each request preempted so far in this step; requests of a
        lower class or of one of these tenants are not admitted.
        """
        min_priority = max([min_priority, *(level for level, _ in preempted)])
        preempted_tenants = {tenant for _, tenant in preempted}
        order = self._order
        has_preempted = False
        while budget.num_left > 0:
            request = order.peek_in_turn(now)
            if (
                request is None
                or request.spec.priority < min_priority
                or request.tenant in preempted_tenants
            ):
                break
            num_blocks = self._blocks.num_held(request)
            is_under_share = shares.is_under_share(
                request.tenant, num_slots=1, num_blocks=num_blocks
            )
            if not (is_under_share and self._may_overtake_blocked(request, now)):
                break
            matched = self._match(request, is_first=True)
            if matched is None or not self._has_free_slot:
                # No preemption for a request that would be late anyway.
                found = self._cache.match(request)
                if self._predictor.check_at_admission(request, found, now) is not None:
                    break
                if not self._preempt_for(request, num_blocks, budget, shares, now):
                    break
                has_preempted = True
                # The preempted requests may be of this class: in this step no request of a lower
                # class is admitted before them.
                min_priority = max(min_priority, request.spec.priority)
                matched = self._match(request, is_first=True)
                if matched is None or not self._has_free_slot:
                    break
            rejection = self._predictor.check_at_admission(request, matched, now)
            if rejection is not None:
                self._transitions.fail(request, rejection, now)
                continue
            is_past = self._blocked is not None and self._blocked is not request
            if self._blocked is not None and is_past:
                self._blocked.num_overtaken += 1
            self._admit(request, matched, budget, now, is_past_blocked=is_past)
            shares.add(request.tenant, num_blocks)
        return has_preempted

    @property
    def _has_free_slot(self) -> bool:
        """Whether one more request may run: a slot is free and the batch limit allows it."""
        running = self._running
        return running.has_free_slot and len(running) < self._sizing.max_num_running

    def _wait_reason(self, budget: TokenBudget, *, is_too_long: bool) -> WaitReason | None:
        """Return why the remaining requests are not admitted, other than for lack of blocks.

        `is_too_long`: the next request needs more tokens than the remaining budget.
        """
        if not len(self._order):
            return None
        if not self._has_free_slot:
            return WaitReason.SLOTS
        if is_too_long or budget.num_left <= 0:
            return WaitReason.TOKEN_BUDGET
        # The remaining requests belong to tenants at their running limit.
        return WaitReason.FAIRNESS

    def _may_overtake_blocked(self, request: Request, now: float) -> bool:
        """Return whether a request may be admitted before the blocked head (the request last found
        to lack blocks). True for the blocked head itself, and if it no longer waits.
        """
        blocked = self._blocked
        if blocked is None or blocked is request or blocked.ticket < 0:
            self._blocked = None
            return True
        if blocked.blocked_since_s == NO_TIME:
            blocked.blocked_since_s = now
        is_in_time = now - blocked.blocked_since_s <= self._max_overtake_s
        return is_in_time and blocked.num_overtaken < self._max_num_overtakes

    def _preempt_for(
        self, request: Request, num_blocks: int, budget: TokenBudget, shares: FairShare, now: float
    ) -> bool:
        """Preempt requests in favour of a tenant under its share; return False if preemption is not
        allowed or would not free enough slots and blocks.
        """
        if not self._blocks.may_preempt or len(self._running) > self._sizing.max_num_running:
            return False
        matched = self._cache.match(request)
        num_short = self._blocks.num_taken(request, matched) - self._blocks.num_left
        shortage = Shortage(
            tenant=request.tenant,
            level=request.spec.priority,
            is_slot=not self._has_free_slot,
            num_blocks_short=max(0, num_short),
            num_blocks=num_blocks,
            matched=tuple(matched),
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
        budget: TokenBudget,
        now: float,
        *,
        is_past_blocked: bool,
    ) -> bool:
        cache = self._cache
        start = len(matched) * cache.block_size
        remaining = len(request.tokens) - start
        # A prompt longer than the token budget is sent alone; the wrapped engine splits it.
        if self._sends_whole_prompts and remaining > budget.num_left and len(budget):
            return False
        count = budget.size(remaining)
        num_tokens = self._blocks.num_tokens(request)
        self._transitions.admit(request, matched, num_tokens, now, is_past_blocked=is_past_blocked)
        cache.extend(request.slot, cache.num_missing(request.slot, start + count))
        budget.add(request, start, count, remaining)
        return True

    def _match(self, request: Request, *, is_first: bool) -> list[int] | None:
        """Return the cached blocks that a request reuses, or None if the request does not fit.

        `is_first`: the request is at the head of the queue. For other requests the search is
        skipped while fewer blocks are free than the request needed at its last attempt.
        """
        num_left = self._blocks.num_left
        # At least the last token's block is never cached. A request behind the head is not matched
        # again while fewer blocks are free than it needed at its last attempt.
        if num_left < (1 if is_first else max(1, request.num_blocks_needed)):
            return None
        matched = self._cache.match(request)
        num_needed = self._blocks.num_taken(request, matched)
        if num_needed <= num_left:
            return matched
        request.num_blocks_needed = num_needed
        return None

    def _may_be_overtaken(self, blocked: Request, now: float) -> bool:
        if not self._max_lookahead or blocked.num_preemptions:
            return False
        if blocked.blocked_since_s == NO_TIME:
            blocked.blocked_since_s = now
        is_in_time = now - blocked.blocked_since_s <= self._max_overtake_s
        is_changed = (
            self._queue.version != self._last_scan_version
            or self._blocks.num_left > self._last_scan_blocks
        )
        return is_in_time and blocked.num_overtaken < self._max_num_overtakes and is_changed
