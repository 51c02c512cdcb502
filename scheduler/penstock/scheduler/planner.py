"""Chooses each step: who runs and how many tokens each computes.

Owns the order of decisions: running decodes first, then prefills under way, then admissions, and
nobody new in a step that preempted. Every request has a number of computed tokens and must catch up
with its total (the view vLLM introduced), so chunked prefill, prefix hits and recomputation after
a preemption are the same thing. A self-paced executor takes prompts whole, and one that it has not
answered yet is planned again in every step, so it weighs on the budget for as long as the engine
behind has it to compute; the budget is that of two steps, because an answer comes when the next
step has begun, which would otherwise find nothing new to compute. Does not look at results.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.flight import Chunk, Flight
from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.request import Request
from penstock.scheduler.running import DecodeRoster


class Planner:
    """Plans one step at a time over a `Lifecycle`."""

    def __init__(self, life: Lifecycle, info: ExecutorInfo, config: SchedulerConfig) -> None:
        self._life = life
        self._budget_tokens = config.max_num_batched_tokens
        self._is_guaranteed = config.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
        self._depth = info.pipeline_depth
        self._info = info
        self._takes_whole_prompts = info.is_self_paced
        # TensorRT-LLM lets nobody in on the strength of blocks to be reused, so who was let in here
        # would wait there (getRemainingBlocksToCompletion; until NVIDIA PR #11637).
        self._counts_no_reuse = info.is_self_paced and self._is_guaranteed
        self._num_steps_ahead = 2 if info.is_self_paced else 1
        # A reservation to max_tokens needs no slack; taking what is needed now does.
        self._watermark_blocks = (
            0 if self._is_guaranteed else int(np.ceil(config.watermark * info.num_blocks))
        )
        self._one_each: NDArray[np.int32] = np.ones(info.max_num_seqs, dtype=np.int32)
        self._has_preempted = False
        self._num_old_blocks = 0
        self._step = 0

    def plan(self, now: float) -> Flight | None:
        """The next step, its tokens accounted as launched.

        Without anybody to run: a step of no rows when slots were given back, since an executor
        must hear of that even if nothing follows; else None.
        """
        self._has_preempted = False
        self._num_old_blocks = self._life.cache.pool.num_used
        num_decodes = self._make_room_for_decodes(now)
        self._life.is_behind = False
        budget = self._num_steps_ahead * (self._budget_tokens - num_decodes)
        chunks = self._continue_prefills(budget, now)
        if not self._has_preempted:
            budget -= sum(chunk.count for chunk in chunks)
            chunks += self._admissions(budget, now, is_prefilling=bool(chunks))
        # Gathered anew if a prefill preempted somebody who decodes.
        roster = self._life.running.decodes(self._life.cache.capacity)
        if not chunks and not len(roster.rows) and not self._life.released:
            return None
        return self._commit(roster, chunks)

    def _make_room_for_decodes(self, now: float) -> int:
        """See that every decode row has a block for its token; the number of rows."""
        life, cache = self._life, self._life.cache
        while True:
            roster = life.running.decodes(cache.capacity)
            if self._depth > 1:
                is_last = roster.starts + 1 >= roster.rows.max_total
                if is_last.any():
                    life.running.stop_decoding(roster.rows.index[is_last])
                    continue
            short = np.flatnonzero(roster.starts >= roster.capacity)
            if not len(short):
                return len(roster.rows)
            if len(short) <= cache.pool.num_available:
                cache.extend_each(roster.rows.index[short])
                roster.capacity[short] += cache.block_size
            else:
                self._preempt(life.running.most_junior(), now)

    def _continue_prefills(self, budget: int, now: float) -> list[Chunk]:
        chunks: list[Chunk] = []
        arrays = self._life.arrays
        for request in self._life.running.prefilling():
            if budget <= 0 and not self._takes_whole_prompts:
                break
            # An earlier one of this loop may have preempted it.
            if request.slot < 0:
                continue
            start = int(arrays.num_computed[request.slot])
            remaining = int(arrays.num_tokens[request.slot]) - start
            count = remaining if self._takes_whole_prompts else min(remaining, budget)
            if self._make_room(request, start + count, now):
                chunks.append(Chunk(request, request.slot, start, count, count == remaining))
                budget -= count
        return chunks

    def _make_room(self, request: Request, num_tokens: int, now: float) -> bool:
        """Blocks for a running request, at the cost of its juniors; False if it was preempted."""
        life = self._life
        missing = life.cache.num_missing(request.slot, num_tokens)
        while missing > life.cache.pool.num_available:
            victim = life.running.most_junior()
            self._preempt(victim, now)
            if victim is request:
                return False
        if missing:
            life.cache.extend(request.slot, missing)
        return True

    def _admissions(self, budget: int, now: float, *, is_prefilling: bool) -> list[Chunk]:
        chunks: list[Chunk] = []
        life, cache = self._life, self._life.cache
        while budget > 0 and life.running.has_free_slot:
            request = life.queue.peek()
            if request is None:
                break
            matched = self._match(request)
            reserve_tokens = self._reserve_tokens(request)
            # Alone, a request may take everything: it fits, or it was refused at the door.
            spare_blocks = self._watermark_blocks if len(life.running) else 0
            counted = () if self._counts_no_reuse else matched
            if not cache.can_admit(counted, reserve_tokens, spare_blocks):
                break
            start = len(matched) * cache.block_size
            remaining = len(request.tokens) - start
            # Longer than a whole step: alone, for the engine behind to cut into chunks.
            if self._takes_whole_prompts and remaining > budget and (is_prefilling or chunks):
                break
            count = remaining if self._takes_whole_prompts else min(remaining, budget)
            life.admit(request, matched, reserve_tokens, now)
            cache.extend(request.slot, cache.num_missing(request.slot, start + count))
            chunks.append(Chunk(request, request.slot, start, count, count == remaining))
            budget -= count
        return chunks

    def _match(self, request: Request) -> list[int]:
        # Logprobs of the prompt need its logits, which a cached block does not have.
        if request.spec.sampling.num_prompt_logprobs >= 0:
            return []
        return self._life.cache.match(request)

    def _reserve_tokens(self, request: Request) -> int:
        if self._is_guaranteed or request.spec.constraint is not None:
            return self._info.num_kept_tokens(request.spec.max_total_tokens)
        return len(request.tokens)

    def _preempt(self, victim: Request, now: float) -> None:
        self._has_preempted = True
        self._life.preempt(victim, now)

    def _commit(self, roster: DecodeRoster, chunks: list[Chunk]) -> Flight:
        """Advance everyone as if the step were done, and write the batch down."""
        life, arrays = self._life, self._life.arrays
        starts, num_decodes = roster.starts, len(roster.rows)
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
                rows = life.running.rows_of(np.concatenate((rows.index, new)))
                for chunk in done:
                    arrays.num_in_flight[chunk.slot] += 1
                    life.running.start_decoding(chunk.slot)
        batch = Batch(
            step=self._step,
            arrays=arrays,
            slots=slots,
            num_tokens=num_tokens,
            starts=starts,
            num_decodes=num_decodes,
            sampled_slots=rows.slots,
            admitted=tuple(life.admitted),
            released=tuple(life.released),
            num_used_blocks=life.cache.pool.num_used,
            num_old_blocks=self._num_old_blocks,
        )
        life.admitted.clear()
        life.released.clear()
        self._step += 1
        is_roster = rows is roster.rows
        return Flight(batch, rows, positions, roster.ones if is_roster else None, tuple(chunks))
