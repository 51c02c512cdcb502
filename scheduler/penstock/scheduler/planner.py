"""Plans each step: which requests run and how many tokens each computes.

The order is: running decodes, prompts of tenants under their share (fair_share.py), other prefills
in progress, other admissions. A step that preempted a request admits only requests of tenants under
their share. Every request has a number of computed tokens; it must reach the request's number of
tokens so far (as in vLLM). So chunked prefill, prefix hits and recomputation after a preemption are
handled in the same way. Results are applied elsewhere (results.py).

A self-paced executor (see `ExecutorInfo`) gets whole prompts. A prompt without a response is
planned again in every step, so that it uses budget while the wrapped engine computes it. The
response to a step arrives only after the next step has begun. That step would then have no budget
for new prompts, so each step gets the budget of two.
"""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.batch_admission import BatchAdmission
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.deadline_predictor import DeadlinePredictor
from penstock.scheduler.decode_pauses import DecodePauses
from penstock.scheduler.events import WaitReason
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedStep, PrefillChunk
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.running import DecodeRoster, RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.token_budget import TokenBudget
from penstock.scheduler.transitions import Transitions
from penstock.scheduler.victims import VictimSelection
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue


class Planner:
    """Plans one step at a time: chooses its rows, allocates their blocks and advances the slot
    arrays.
    """

    def __init__(  # noqa: PLR0913 - each is one thing that a plan depends on
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        *,
        arrays: SlotArrays,
        cache: KVCache,
        running: RunningSet,
        queue: WaitingQueue,
        waits: WaitClock,
        tenants: TenantCounters,
        sizing: StepSizing,
        predictor: DeadlinePredictor,
        victims: VictimSelection,
        admission: BatchAdmission,
        transitions: Transitions,
    ) -> None:
        self._arrays = arrays
        self._cache = cache
        self._running = running
        self._waits = waits
        self._order = queue.order
        self._tenants = tenants
        self._sizing = sizing
        self._predictor = predictor
        self._victims = victims
        self._admission = admission
        self._transitions = transitions
        self._is_fair = config.order is SchedulingOrder.FAIR
        self._max_prefill_share = config.max_prefill_share if self._is_fair else 1.0
        self._depth = info.pipeline_depth
        self._sends_whole_prompts = info.is_self_paced
        self._num_steps_ahead = 2 if info.is_self_paced else 1
        self._one_each: NDArray[np.int32] = np.ones(info.max_num_seqs, dtype=np.int32)
        self._has_preempted = False
        # Classes and tenants of requests preempted in this step for lack of blocks.
        self._preempted: list[tuple[int, int]] = []
        self._prefills_under_share = (
            self._is_fair and not info.is_self_paced and math.isfinite(config.yield_ratio)
        )
        self._yield_ratio = config.yield_ratio
        self._stride = config.aging_stride
        self._num_under_share_steps = 0
        self._has_left_out = False
        self._pauses = DecodePauses(arrays, running, tenants, sizing, self._shares)
        self._num_old_blocks = 0
        self._step = 0

    def plan(self, now: float) -> LaunchedStep | None:
        """Return the next step, and advance the slot arrays as if it had been computed.

        If no request can run, return None, or a step without rows if slots were released: the
        executor must be notified of releases in any case.
        """
        self._has_preempted = False
        self._preempted.clear()
        self._num_old_blocks = self._cache.pool.num_used
        num_decodes = self._allocate_decode_blocks(now)
        self._running.is_behind = False
        budget = TokenBudget(
            self._num_steps_ahead * self._prefill_tokens(num_decodes),
            max_share=self._max_prefill_share,
            is_whole=self._sends_whole_prompts,
        )
        under_share: list[Request] = []
        waits_for: WaitReason | None = None
        # Most steps of a lightly loaded engine only decode.
        if self._running.num_prefilling or len(self._order):
            under_share, waits_for = self._serve_prompts(budget, now)
        else:
            self._has_left_out = False
        self._waits.note_reason(waits_for, now)
        chunks = list(budget.chunks())
        # Built again if a prefill preempted a decode, and after a pause.
        roster = self._running.decodes(self._cache.capacity)
        if self._pauses.pause(under_share, chunks, roster):
            roster = self._running.decodes(self._cache.capacity)
        if not chunks and not len(roster.rows) and not self._running.has_released:
            return None
        step = self._commit(roster, chunks)
        self._running.resume_decoding()
        return step

    def _serve_prompts(
        self, budget: TokenBudget, now: float
    ) -> tuple[list[Request], WaitReason | None]:
        """Give `budget` to prompts in progress and to new requests.

        Return the requests of tenants under their share that got tokens, and why the next request
        in the queue was not admitted (None if none is left).
        """
        serves_all = self._serve_under_share(budget, now)
        under_share = budget.requests if self._prefills_under_share else []
        if not serves_all:
            return under_share, WaitReason.FAIRNESS if len(self._order) else None
        self._continue_prefills(budget, now)
        if self._has_preempted:
            waits_for = WaitReason.BLOCKS if len(self._order) else None
        else:
            waits_for = self._admission.admit(budget, now)
        budget.top_up(self._cache)
        return under_share, waits_for

    def _prefill_tokens(self, num_decodes: int) -> int:
        """Return the prefill token budget of a step with `num_decodes` decodes."""
        sizing = self._sizing
        if not sizing.has_target:
            return sizing.budget(num_decodes)
        columns = slice(0, self._running.high_water)
        roster = self._running.decodes(self._cache.capacity)
        return sizing.budget(
            num_decodes,
            num_context_tokens=int(self._arrays.num_computed[columns].sum()),
            num_decode_context_tokens=int(roster.starts.sum()),
        )

    def _allocate_decode_blocks(self, now: float) -> int:
        """Ensure that every decode row has a block for its token, by preemption if necessary;
        return the number of rows.
        """
        running, cache = self._running, self._cache
        while True:
            roster = running.decodes(cache.capacity)
            if self._depth > 1:
                is_last = roster.starts + 1 >= roster.rows.max_total
                if np.count_nonzero(is_last):
                    running.stop_decoding(roster.rows.index[is_last])
                    continue
            short = (roster.starts >= roster.capacity).nonzero()[0]
            if not len(short):
                return len(roster.rows)
            if len(short) <= cache.pool.num_available:
                cache.extend_each(roster.rows.index[short])
                roster.capacity[short] += cache.block_size
            else:
                self._preempt(self._victim(set()), now)

    def _serve_under_share(self, budget: TokenBudget, now: float) -> bool:
        """Give budget first to prompts, in progress or new, of tenants under their share
        (fair_share.py).

        Return whether other requests may use the remaining budget. A step that ends such a prompt
        computes no other prompts, so that its first token is not delayed, unless the previous step
        already left other prompts out for this reason. Prompts in progress of a higher class go
        before such prompts.

        **Bound.** While other prompts are in progress, at least one step in `aging_stride` serves
        all of them as if no tenant were under its share, or leaves budget for them.
        """
        running, has_left_out = self._running, self._has_left_out
        self._has_left_out = False
        if not self._prefills_under_share or self._tenants.num_live < 2:
            return True
        shares = self._shares()
        under_share: list[Request] = []
        others: list[Request] = []
        for request in running.prefilling_by_level():
            (under_share if shares.is_under_share(request.tenant) else others).append(request)
        if others and self._num_under_share_steps + 1 >= self._stride:
            self._num_under_share_steps = 0
            return True
        min_priority = max((request.spec.priority for request in others), default=-math.inf)
        self._continue([r for r in under_share if r.spec.priority >= min_priority], budget, now)
        if self._admission.admit_under_share(budget, shares, min_priority, self._preempted, now):
            self._has_preempted = True
        budget.top_up(self._cache)
        self._has_left_out = budget.ends_any and not has_left_out
        is_over = self._has_left_out or budget.num_left <= 0
        self._num_under_share_steps = self._num_under_share_steps + 1 if is_over else 0
        return not self._has_left_out

    def _continue_prefills(self, budget: TokenBudget, now: float) -> None:
        running = self._running
        in_prefill = running.prefilling_by_level() if self._is_fair else running.prefilling()
        self._continue(in_prefill, budget, now)

    def _continue(self, in_prefill: list[Request], budget: TokenBudget, now: float) -> None:
        arrays, urgent = self._arrays, self._urgent(in_prefill, now)
        if urgent:
            in_prefill = sorted(
                in_prefill, key=lambda r: (-int(arrays.level[r.slot]), urgent.get(r.slot, NO_TIME))
            )
        served = budget.slots
        for request in in_prefill:
            if budget.num_left <= 0 and not self._sends_whole_prompts:
                break
            # An earlier iteration may have preempted it.
            if request.slot < 0 or request.slot in served:
                continue
            start = int(arrays.num_computed[request.slot])
            remaining = int(arrays.num_tokens[request.slot]) - start
            count = budget.size(remaining, is_shared=request.slot not in urgent)
            if self._allocate_blocks(request, start + count, budget, now):
                budget.add(request, start, count, remaining)

    def _urgent(self, in_prefill: list[Request], now: float) -> dict[int, float]:
        """Return the urgent prompts: by slot, the TTFT deadlines of prompts that get the whole
        budget first.

        See `DeadlinePredictor.urgent`. They go first within their class. No prompt is urgent while
        a request of a higher class waits, because that request needs budget to be admitted.

        **Bound.** One step in `aging_stride` serves all prompts as if none were urgent.
        """
        if not self._is_fair or self._step % self._stride == 0:
            return {}
        urgent = self._predictor.urgent(in_prefill, now)
        first = self._order.peek(now) if urgent else None
        if first is None:
            return urgent
        level = self._arrays.level
        return {slot: s for slot, s in urgent.items() if level[slot] >= first.spec.priority}

    def _allocate_blocks(
        self, request: Request, num_tokens: int, budget: TokenBudget, now: float
    ) -> bool:
        """Allocate blocks for a running request, preempting others if necessary.

        Return False if the request itself was preempted. Requests that got tokens in this step are
        not preempted.
        """
        cache = self._cache
        missing = cache.num_missing(request.slot, num_tokens)
        while missing > cache.pool.num_available:
            victim = self._victim(budget.slots)
            self._preempt(victim, now)
            if victim is request:
                return False
        if missing:
            cache.extend(request.slot, missing)
        return True

    def _victim(self, spared: set[int]) -> Request:
        if self._is_fair:
            shares = self._shares() if self._tenants.num_live > 1 else None
            return self._victims.choose_victim(spared, shares)
        # Prompts are served in order of seniority, so requests with tokens are never the most
        # junior.
        return self._running.most_junior()

    def _shares(self) -> FairShare:
        return FairShare(self._arrays, self._cache, self._running, self._tenants, self._yield_ratio)

    def _preempt(self, victim: Request, now: float) -> None:
        self._has_preempted = True
        self._preempted.append((int(self._arrays.level[victim.slot]), victim.tenant))
        self._transitions.preempt(victim, now)

    def _commit(self, roster: DecodeRoster, chunks: list[PrefillChunk]) -> LaunchedStep:
        """Advance the progress of all rows as if the step had been computed; return the step."""
        arrays, running = self._arrays, self._running
        starts, num_decodes = roster.starts, len(roster.rows)
        running.note_step(chunks, num_decodes)
        columns = slice(0, len(roster.ones))
        arrays.num_computed[columns] += roster.ones
        arrays.num_in_flight[columns] += roster.ones
        roster.starts = starts + 1
        rows, positions = roster.rows, roster.starts
        slots, num_tokens = rows.slots, self._one_each[:num_decodes]
        if chunks:
            table: NDArray[np.int32] = np.array(
                [(chunk.slot, chunk.start, chunk.count) for chunk in chunks], dtype=np.int32
            )
            slots = np.concatenate((slots, table[:, 0]))
            starts = np.concatenate((starts, table[:, 1]))
            num_tokens = np.concatenate((num_tokens, table[:, 2]))
            arrays.num_computed[table[:, 0]] += table[:, 2]
            done = [chunk for chunk in chunks if chunk.completes]
            if done:
                ends: NDArray[np.int32] = np.array([c.start + c.count for c in done], np.int32)
                positions = np.concatenate((positions, ends))
                new: NDArray[np.intp] = np.array([chunk.slot for chunk in done], dtype=np.intp)
                rows = running.rows_of(np.concatenate((rows.index, new)))
                for chunk in done:
                    arrays.num_in_flight[chunk.slot] += 1
                    running.start_decoding(chunk.slot)
        admitted, released = running.take_changes()
        batch = Batch(
            step=self._step,
            arrays=arrays,
            slots=slots,
            num_tokens=num_tokens,
            starts=starts,
            num_decodes=num_decodes,
            sampled_slots=rows.slots,
            admitted=admitted,
            released=released,
            num_used_blocks=self._cache.pool.num_used,
            num_old_blocks=self._num_old_blocks,
            num_paused=running.num_paused,
        )
        self._step += 1
        is_roster = rows is roster.rows
        return LaunchedStep(
            batch, rows, positions, roster.ones if is_roster else None, tuple(chunks)
        )
