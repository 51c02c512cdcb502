"""Plans each step: which requests run and how many tokens each computes.

Owns the order of decisions: running decodes first, then the prompts of tenants under their share
(shares.py), then other prefills in progress, and then other admissions, none in a step that
preempted. Every request has a number of computed tokens and must catch up with its total (as in
vLLM), so chunked prefill, prefix hits and recomputation after a preemption are the same. A
self-paced executor takes prompts whole, and one without a response is planned again in every step,
so it weighs on the budget for as long as the engine behind computes it; the budget is that of two
steps, because a response comes when the next step has begun, which would otherwise find nothing new
to compute. Does not look at results.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.admissions import Admissions
from penstock.scheduler.batch import Batch
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.events import WaitReason
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.flight import Chunk, Flight
from penstock.scheduler.grants import Grants
from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.running import DecodeRoster
from penstock.scheduler.shares import Shares
from penstock.scheduler.victims import choose_victim

MAX_PAUSED_STEPS = 3
"""Steps in a row from which the decodes of tenants over their share are left out."""


class Planner:
    """Plans one step at a time over a `Lifecycle`."""

    def __init__(self, life: Lifecycle, info: ExecutorInfo, config: SchedulerConfig) -> None:
        self._life = life
        self._admissions = Admissions(life, info, config)
        self._max_prefill_share = config.max_prefill_share if life.is_fair else 1.0
        self._depth = info.pipeline_depth
        self._takes_whole_prompts = info.is_self_paced
        self._num_steps_ahead = 2 if info.is_self_paced else 1
        self._one_each: NDArray[np.int32] = np.ones(info.max_num_seqs, dtype=np.int32)
        self._has_preempted = False
        # Classes and tenants of requests preempted in this step for lack of blocks.
        self._thrown_out: list[tuple[int, int]] = []
        self._serves_light = (
            life.is_fair and not info.is_self_paced and math.isfinite(config.yield_ratio)
        )
        self._yield_ratio = config.yield_ratio
        self._stride = config.aging_stride
        self._num_light_steps = 0
        self._has_left_out = False
        self._num_paused_steps = 0
        self._num_old_blocks = 0
        self._step = 0

    def plan(self, now: float) -> Flight | None:
        """The next step, its tokens accounted as launched.

        Without running requests: a step of no rows when slots were released, since an executor must
        be notified of that even if nothing follows; else None.
        """
        self._has_preempted = False
        self._thrown_out.clear()
        self._num_old_blocks = self._life.cache.pool.num_used
        num_decodes = self._make_room_for_decodes(now)
        self._life.is_behind = False
        grants = Grants(
            self._num_steps_ahead * self._prefill_tokens(num_decodes),
            max_share=self._max_prefill_share,
            is_whole=self._takes_whole_prompts,
        )
        serves_all = self._serve_light(grants, now)
        light = grants.requests if self._serves_light else []
        if serves_all:
            self._continue_prefills(grants, now)
            if self._has_preempted:
                waits_for = WaitReason.BLOCKS if len(self._life.queue.order) else None
            else:
                waits_for = self._admissions.admit(grants, now)
            grants.top_up(self._life.cache)
        else:
            waits_for = WaitReason.FAIRNESS if len(self._life.queue.order) else None
        self._life.waits.tell(waits_for, now)
        self._pause_decodes(light)
        chunks = list(grants.chunks())
        # Gathered again if a prefill preempted a decode.
        roster = self._life.running.decodes(self._life.cache.capacity)
        if not chunks and not len(roster.rows) and not self._life.released:
            return None
        flight = self._commit(roster, chunks)
        self._life.running.resume_decoding()
        return flight

    def _prefill_tokens(self, num_decodes: int) -> int:
        """Tokens of prefill that the step may hold in addition to that many decodes."""
        life, pace = self._life, self._life.outlook.pace
        if not pace.has_target:
            return pace.budget(num_decodes)
        columns = slice(0, life.running.high_water)
        roster = life.running.decodes(life.cache.capacity)
        return pace.budget(
            num_decodes,
            num_context_tokens=int(life.arrays.num_computed[columns].sum()),
            num_decode_context_tokens=int(roster.starts.sum()),
        )

    def _make_room_for_decodes(self, now: float) -> int:
        """Ensure that every decode row has a block for its token; returns the number of rows."""
        life, cache = self._life, self._life.cache
        while True:
            roster = life.running.decodes(cache.capacity)
            if self._depth > 1:
                is_last = roster.starts + 1 >= roster.rows.max_total
                if np.count_nonzero(is_last):
                    life.running.stop_decoding(roster.rows.index[is_last])
                    continue
            short = (roster.starts >= roster.capacity).nonzero()[0]
            if not len(short):
                return len(roster.rows)
            if len(short) <= cache.pool.num_available:
                cache.extend_each(roster.rows.index[short])
                roster.capacity[short] += cache.block_size
            else:
                self._preempt(self._victim(set()), now)

    def _serve_light(self, grants: Grants, now: float) -> bool:
        """Prompts of light tenants (shares.py) first, under way or new, with all they can use.

        Whether others may have what is left. A step that ends such a prompt gives others' prompts
        nothing, so that its first token does not wait for theirs; but the next one does. None goes
        before a prompt of a higher class that is under way.

        **Bound.** While prompts of others are under way, they are served as if no tenant were light
        in one step of `aging_stride`, whatever light tenants ask for.
        """
        life, has_left_out = self._life, self._has_left_out
        self._has_left_out = False
        is_useful = life.running.num_prefilling or len(life.queue)
        if not (self._serves_light and is_useful and life.tenants.num_live > 1):
            return True
        shares = self._shares()
        light: list[Request] = []
        others: list[Request] = []
        for request in life.running.prefilling_by_level():
            (light if shares.is_light(request.tenant) else others).append(request)
        if others and self._num_light_steps + 1 >= self._stride:
            self._num_light_steps = 0
            return True
        least = max((request.spec.priority for request in others), default=-math.inf)
        self._continue([r for r in light if r.spec.priority >= least], grants, now)
        if self._admissions.admit_light(grants, shares, least, self._thrown_out, now):
            self._has_preempted = True
        grants.top_up(life.cache)
        self._has_left_out = grants.ends_any and not has_left_out
        is_over = self._has_left_out or grants.budget_tokens <= 0
        self._num_light_steps = self._num_light_steps + 1 if is_over else 0
        return not self._has_left_out

    def _pause_decodes(self, light: Sequence[Request]) -> None:
        """Leave the decodes of tenants over their share out of a step for a light tenant's prompt.

        Next to a full batch of decodes such a prompt takes up to twice as long. `light`: the light
        prompts of this step. Paused are tenants that were served more than the light ones, so that
        a tenant of many short requests does not hold up others for longer than until it had as
        much; decodes of a higher class continue, and none is left out of more than
        `MAX_PAUSED_STEPS` in a row.
        """
        num_paused, self._num_paused_steps = self._num_paused_steps, 0
        life = self._life
        if not light or num_paused == MAX_PAUSED_STEPS or life.tenants.num_live < 2:
            return
        priority = max(request.spec.priority for request in light)
        service = life.tenants.service
        served = max(float(service[request.tenant]) for request in light)
        slots = life.running.decodes(life.cache.capacity).rows.index
        tenants = life.arrays.tenant[slots]
        is_over = ~self._shares().are_light(tenants) & (service[tenants] > served)
        paused = slots[is_over & (life.arrays.level[slots] <= priority)]
        if len(paused):
            life.running.pause_decoding(paused)
            self._num_paused_steps = num_paused + 1

    def _continue_prefills(self, grants: Grants, now: float) -> None:
        running = self._life.running
        under_way = running.prefilling_by_level() if self._life.is_fair else running.prefilling()
        self._continue(under_way, grants, now)

    def _continue(self, under_way: list[Request], grants: Grants, now: float) -> None:
        arrays, urgent = self._life.arrays, self._urgent(under_way, now)
        if urgent:
            under_way = sorted(
                under_way, key=lambda r: (-int(arrays.level[r.slot]), urgent.get(r.slot, NO_TIME))
            )
        served = grants.slots
        for request in under_way:
            if grants.budget_tokens <= 0 and not self._takes_whole_prompts:
                break
            # An earlier one of this loop may have preempted it.
            if request.slot < 0 or request.slot in served:
                continue
            start = int(arrays.num_computed[request.slot])
            remaining = int(arrays.num_tokens[request.slot]) - start
            count = grants.size(remaining, is_shared=request.slot not in urgent)
            if self._make_room(request, start + count, grants, now):
                grants.add(request, start, count, remaining)

    def _urgent(self, under_way: list[Request], now: float) -> dict[int, float]:
        """Slots of prompts that go first in their class and share with no other; when they are due.

        See urgency.py. None while a request of a higher class waits, which needs budget to get in.

        **Bound.** In one step of `aging_stride` all are served as if none were urgent.
        """
        life = self._life
        if not life.is_fair or self._step % self._stride == 0:
            return {}
        urgent = life.outlook.urgent(under_way, now)
        first = life.queue.peek(now) if urgent else None
        if first is None:
            return urgent
        level = life.arrays.level
        return {slot: s for slot, s in urgent.items() if level[slot] >= first.spec.priority}

    def _make_room(self, request: Request, num_tokens: int, grants: Grants, now: float) -> bool:
        """Blocks for a running request, by preemption if necessary; False if it was preempted
        itself.

        Requests that got tokens in this step keep them.
        """
        life = self._life
        missing = life.cache.num_missing(request.slot, num_tokens)
        while missing > life.cache.pool.num_available:
            victim = self._victim(grants.slots)
            self._preempt(victim, now)
            if victim is request:
                return False
        if missing:
            life.cache.extend(request.slot, missing)
        return True

    def _victim(self, spared: set[int]) -> Request:
        if self._life.is_fair:
            shares = self._shares() if self._life.tenants.num_live > 1 else None
            return choose_victim(self._life, spared, shares)
        # In order of seniority the requests that got tokens are never the most junior.
        return self._life.running.most_junior()

    def _shares(self) -> Shares:
        life = self._life
        return Shares(life.arrays, life.cache, life.running, life.tenants, self._yield_ratio)

    def _preempt(self, victim: Request, now: float) -> None:
        self._has_preempted = True
        self._thrown_out.append((int(self._life.arrays.level[victim.slot]), victim.tenant))
        self._life.preempt(victim, now)

    def _commit(self, roster: DecodeRoster, chunks: list[Chunk]) -> Flight:
        """Advance all requests as if the step were done, and make the batch."""
        life, arrays = self._life, self._life.arrays
        starts, num_decodes = roster.starts, len(roster.rows)
        life.running.stays.note_step(num_decodes + len(chunks), chunks)
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
            num_paused=life.running.num_paused,
        )
        life.admitted.clear()
        life.released.clear()
        self._step += 1
        is_roster = rows is roster.rows
        return Flight(batch, rows, positions, roster.ones if is_roster else None, tuple(chunks))
