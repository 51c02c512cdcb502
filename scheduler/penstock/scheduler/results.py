"""Applies an executor's results to the requests.

Appends the tokens of a `StepResult` and detects first tokens and ends. Uses array operations over
all rows; loops over requests in Python only for events that occur once per request.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import SlotFailure, StepResult, TokenLogprobs
from penstock.scheduler.deadline_predictor import Rejection
from penstock.scheduler.events import EventBuffer, PrefixFound
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedStep, PrefillChunk, SamplingRows
from penstock.scheduler.quotas import QuotaAccounts
from penstock.scheduler.request import NO_TIME, FailureReason, FinishReason, Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.transitions import Transitions
from penstock.scheduler.waiting_queue import WaitingQueue


class Results:
    """Applies results to the running requests, and adds the resulting events to `events`.

    `tenants`: None to skip the accounting of service.
    """

    def __init__(  # noqa: PLR0913 - each is one thing that a result changes
        self,
        info: ExecutorInfo,
        *,
        arrays: SlotArrays,
        cache: KVCache,
        running: RunningSet,
        queue: WaitingQueue,
        tenants: TenantCounters | None,
        quotas: QuotaAccounts,
        transitions: Transitions,
        events: EventBuffer,
    ) -> None:
        self._arrays = arrays
        self._cache = cache
        self._running = running
        self._queue = queue
        self._tenants = tenants
        self._quotas = quotas
        self._transitions = transitions
        self._events = events
        self._depth = info.pipeline_depth
        self._is_self_paced = info.is_self_paced
        self._flat_tokens = arrays.token_ids.reshape(-1)

    def apply(self, step: LaunchedStep, result: StepResult, now: float) -> None:
        """Advance the requests of a launched step by its result.

        Raises ValueError if the result does not match the batch (a bug of the executor).
        """
        if result.counts is not None and self._depth > 1:
            raise ValueError("token counts require a pipeline depth of 1")
        for failure in result.failures:
            request = self._live(step, failure.slot)
            if request is not None:
                # The failed request's row must not be planned again by this call.
                step.dropped.add(failure.slot)
                rejection = Rejection(reason=_reason_of(failure))
                self._transitions.fail(request, rejection, now, failure.detail)
        self._note_prompts(step, result, now)
        if result.counts is None and result.slots is step.batch.sampled_slots:
            self._append_all(step, result, now)
        else:
            self._append_some(step, result, now)
        for end in result.ends:
            request = self._live(step, end.slot)
            if request is not None:
                self._transitions.finish(request, end.reason, now, end.stop_id)

    def _live(self, step: LaunchedStep, slot: int) -> Request | None:
        return None if slot in step.dropped else self._running.request_at(slot)

    def _note_prompts(self, step: LaunchedStep, result: StepResult, now: float) -> None:
        for chunk in self._computed_chunks(step, result):
            self._cache.register(chunk.request, chunk.start + chunk.count)
            if chunk.completes:
                if result.counts is None:
                    self._note_first_token(chunk.request, now)
                self._queue.release_held(chunk.request.spec.key)
        for slot, first, logprobs in result.prompt_logprobs:
            request = self._live(step, slot)
            if request is not None:
                self._events.prompt_logprobs.append((request.spec.key, first, logprobs))
        for slot, num_cached in result.num_cached:
            request = self._live(step, slot)
            if request is not None:
                self._events.changes.append(
                    PrefixFound(key=request.spec.key, at_s=now, num_cached_tokens=num_cached)
                )

    def _note_first_token(self, request: Request, now: float) -> None:
        """Record the time of a request's first token, after which its TTFT deadline no longer
        applies; a no-op for later tokens.
        """
        if request.first_token_s == NO_TIME:
            request.first_token_s = now
            self._arrays.deadline[request.slot] = request.spec.deadline_s

    def _computed_chunks(self, step: LaunchedStep, result: StepResult) -> list[PrefillChunk]:
        """Return the prefill rows whose requests are still in their slots; for a self-paced
        executor (see `ExecutorInfo`), only rows that returned a token.
        """
        chunks = [chunk for chunk in step.chunks if chunk.slot not in step.dropped]
        if not self._is_self_paced or not chunks:
            return chunks
        sampled = set(_sampled_slots(result))
        return [chunk for chunk in chunks if chunk.slot in sampled]

    def _append_all(self, step: LaunchedStep, result: StepResult, now: float) -> None:
        """Append one token to every row, except rows whose slot was released since the launch. This
        is the usual case. Raises ValueError if the number of tokens is not the number of rows.
        """
        rows, positions, tokens, logprobs = (
            step.rows,
            step.positions,
            result.tokens,
            result.logprobs,
        )
        ones = step.ones
        if len(tokens) != len(rows):
            raise ValueError(f"{len(rows)} slots sampled, {len(tokens)} tokens returned")
        if step.dropped:
            is_kept = np.ones(self._arrays.num_slots, dtype=np.bool_)
            is_kept[list(step.dropped)] = False
            keep = np.flatnonzero(is_kept[rows.index])
            rows, positions, tokens, ones = rows.take(keep), positions[keep], tokens[keep], None
            logprobs = None if logprobs is None else logprobs.take(keep)
        self._append(rows, positions, tokens, logprobs, ones, now)

    def _append(
        self,
        rows: SamplingRows,
        positions: NDArray[np.int32],
        tokens: NDArray[np.int32],
        logprobs: TokenLogprobs | None,
        ones: NDArray[np.int32] | None,
        now: float,
    ) -> NDArray[np.bool_]:
        """Append one token to every row, charge it to its tenant, and finish the requests that it
        ends; return which rows ended, bool [m].
        """
        arrays = self._arrays
        self._flat_tokens[rows.offsets + positions] = tokens
        if ones is None:
            arrays.num_tokens[rows.index] += 1
            arrays.num_in_flight[rows.index] -= 1
        else:
            columns = slice(0, len(ones))
            arrays.num_tokens[columns] += ones
            arrays.num_in_flight[columns] -= ones
        if self._tenants is not None:
            self._tenants.charge_outputs(rows.tenants)
        self._quotas.charge_outputs(rows.tenants, now)
        self._events.add_tokens(rows.keys, tokens, logprobs)
        ended, is_stop = rows.ended(tokens, positions + 1)
        if np.count_nonzero(ended):
            self._finish(rows, tokens, ended.nonzero()[0], is_stop, now)
        return ended

    def _finish(
        self,
        rows: SamplingRows,
        tokens: NDArray[np.int32],
        which: NDArray[np.intp],
        is_stop: NDArray[np.bool_],
        now: float,
    ) -> None:
        for row in which.tolist():
            request = self._running.request_at(int(rows.index[row]))
            if request is None:
                raise ValueError(f"slot {rows.index[row]} ended but no request is in it")
            if is_stop[row]:
                self._transitions.finish(request, FinishReason.STOP, now, stop_id=int(tokens[row]))
            else:
                self._transitions.finish(request, FinishReason.LENGTH, now)

    def _append_some(self, step: LaunchedStep, result: StepResult, now: float) -> None:
        """Append the tokens in the general case, in which a row may be released since the launch,
        may be missing from the result, or may have several tokens. Raises ValueError if the result
        does not match the batch.
        """
        row_of = {slot: row for row, slot in enumerate(step.rows.slots.tolist())}
        slots = result.slots.tolist()
        counts = [1] * len(slots) if result.counts is None else result.counts.tolist()
        if sum(counts) != len(result.tokens):
            raise ValueError(f"{sum(counts)} tokens announced, {len(result.tokens)} returned")
        starts = np.cumsum([0, *counts])[:-1].tolist()
        alive = [i for i, slot in enumerate(slots) if slot not in step.dropped]
        unknown = [slots[i] for i in alive if slots[i] not in row_of]
        if unknown:
            raise ValueError(f"tokens for slots {unknown} that did not sample")
        sampled = {slots[i] for i in alive if counts[i]}
        self._replan_unsampled(step, sampled)
        for slot in sampled:
            request = self._running.request_at(slot)
            if request is not None:
                self._note_first_token(request, now)
        alive = [i for i in alive if counts[i]]
        for index in range(max((counts[i] for i in alive), default=0)):
            alive = [i for i in alive if counts[i] > index]
            rows = step.rows.take(np.array([row_of[slots[i]] for i in alive], dtype=np.intp))
            picks = np.array([starts[i] + index for i in alive], dtype=np.intp)
            if index:
                self._arrays.num_computed[rows.index] += 1
                self._arrays.num_in_flight[rows.index] += 1
                self._running.discard_roster()
                self._running.is_behind = True
            positions = step.positions[[row_of[slots[i]] for i in alive]] + index
            logprobs = None if result.logprobs is None else result.logprobs.take(picks)
            ended = self._append(
                rows, positions.astype(np.int32), result.tokens[picks], logprobs, None, now
            )
            alive = [i for i, is_over in zip(alive, ended.tolist(), strict=True) if not is_over]

    def _replan_unsampled(self, step: LaunchedStep, sampled: set[int]) -> None:
        """Undo the progress of rows that sampled nothing, so that they are planned again; raise
        ValueError if there is such a row at a pipeline depth above 1.
        """
        unsampled = [
            slot
            for slot in step.rows.slots.tolist()
            if slot not in sampled and slot not in step.dropped
        ]
        if not unsampled:
            return
        if self._depth > 1:
            raise ValueError(f"no tokens for slots {unsampled}")
        self._arrays.num_computed[unsampled] -= 1
        self._arrays.num_in_flight[unsampled] -= 1
        if self._is_self_paced:
            self._replan_prompts(step, set(unsampled))
        else:
            self._running.return_to_prefill(unsampled)

    def _replan_prompts(self, step: LaunchedStep, unsampled: set[int]) -> None:
        """Undo the progress of whole prompts without a result, so that they are planned again;
        decodes are not affected.
        """
        chunks = [chunk for chunk in step.chunks if chunk.slot in unsampled]
        for chunk in chunks:
            self._arrays.num_computed[chunk.slot] -= chunk.count - 1
        self._running.return_to_prefill([chunk.slot for chunk in chunks])


def _sampled_slots(result: StepResult) -> list[int]:
    slots = result.slots if result.counts is None else result.slots[result.counts > 0]
    sampled: list[int] = slots.tolist()
    return sampled


def _reason_of(failure: SlotFailure) -> FailureReason:
    if not failure.is_rejected:
        return FailureReason.EXECUTOR_REQUEST_FAILED
    if failure.is_constraint_error:
        return FailureReason.CONSTRAINT_REJECTED
    return FailureReason.EXECUTOR_REJECTED
