"""Creates the snapshot of a service from the data that the observer receives.

Computes figures from records, heartbeats and steps, and stores the last heartbeat of each front
process. The counts of an ended front are kept, and the figures of its current state are removed.
Sends no queries. Times are seconds on the machine's monotonic clock, except the time in the
snapshot.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from penstock.scheduler.executor import ExecutorInfo
from penstock.server.error_reason import REJECTIONS
from penstock.server.ipc.frames import EngineHello
from penstock.server.observe.frames import Heartbeat, OutcomeCount
from penstock.server.observe.listeners import NO_TOTALS, ServiceListener
from penstock.server.observe.operations.engine_steps import DurationWindow, EngineSteps
from penstock.server.observe.operations.snapshot import (
    CacheSnapshot,
    FrontSnapshot,
    ModelSnapshot,
    Snapshot,
)
from penstock.server.observe.request_record import RequestRecord, SegmentKind

MAX_ENDED_FRONTS = 256
"""Maximum number of ended fronts with separate counts. The counts of older ones are summed."""

_OK, _CANCELLED = 0, 1
_CANCELLED_NAME = "CANCELLED"


class RequestCounts:
    """Counts of accepted, rejected, completed, cancelled and failed requests over all front
    processes."""

    def __init__(self) -> None:
        self._heartbeats: dict[tuple[int, int], Heartbeat] = {}
        self._pid_of: dict[int, int] = {}
        self._past: Counter[str] = Counter()

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Store the heartbeat of a front. It replaces the previous heartbeat of this front."""
        process = (heartbeat.front_id, heartbeat.pid)
        # Move it to the end, so that the oldest fronts are dropped first.
        self._heartbeats.pop(process, None)
        self._heartbeats[process] = heartbeat
        self._pid_of[heartbeat.front_id] = heartbeat.pid
        self._merge_old()

    def front_disconnected(self, front_id: int) -> None:
        """Record that a front has ended. Its counts are kept."""
        self._pid_of.pop(front_id, None)

    @property
    def live(self) -> tuple[Heartbeat, ...]:
        """The last heartbeat of each live front, in the order of their ids."""
        return tuple(self._heartbeats[process] for process in sorted(self._pid_of.items()))

    @property
    def counts(self) -> Counter[str]:
        """The numbers of `accepted`, `rejected`, `completed`, `cancelled` and `failed` requests,
        over all fronts that have ever run."""
        total = Counter(self._past)
        for heartbeat in self._heartbeats.values():
            total.update(_counts_of(heartbeat))
        return total

    def views(self) -> tuple[FrontSnapshot, ...]:
        """Return the snapshot of each live front."""
        return tuple(
            FrontSnapshot(
                index=heartbeat.front_id,
                pid=heartbeat.pid,
                num_streams=heartbeat.num_streams,
                num_live=heartbeat.num_live,
                num_backlog_tokens=heartbeat.num_backlog_tokens,
            )
            for heartbeat in self.live
        )

    def _merge_old(self) -> None:
        live = set(self._pid_of.items())
        ended = [process for process in self._heartbeats if process not in live]
        for process in ended[: max(0, len(ended) - MAX_ENDED_FRONTS)]:
            self._past.update(_counts_of(self._heartbeats.pop(process)))


def _counts_of(heartbeat: Heartbeat) -> Counter[str]:
    counts = Counter({"accepted": heartbeat.num_submitted})
    for kind, num in _kinds(heartbeat.outcomes):
        counts[kind] += num
    return counts


def _kinds(outcomes: Iterable[OutcomeCount]) -> Iterable[tuple[str, int]]:
    """Yield pairs (kind, number of requests). The kind is `completed`, `cancelled`, `rejected` or
    `failed`. Cancelled requests also have a pair `completed`."""
    for outcome in outcomes:
        is_cancelled = outcome.code == _CANCELLED or outcome.finish_reason == _CANCELLED_NAME
        if is_cancelled:
            yield "cancelled", outcome.num
        if is_cancelled or outcome.code == _OK:
            yield "completed", outcome.num
        elif outcome.reason in REJECTIONS:
            yield "rejected", outcome.num
        else:
            yield "failed", outcome.num


MAX_ESTIMATE_AGE_S = 10.0
"""Age limit of a predicted wait, in seconds."""


class SnapshotMaker(ServiceListener):
    """Aggregates the observer's events, and creates a snapshot of the service from them on demand.

    Args:
        model: Name of the served model.
        max_num_batched_tokens: Token budget of a step.
        started_s: Start of the service on `clock`; None for the current time.
        clock: Returns seconds on the monotonic clock.
        unix_clock: Returns seconds since 1970.
    """

    def __init__(
        self,
        model: str,
        *,
        max_num_batched_tokens: int = 0,
        started_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._clock = clock
        self._unix_clock = unix_clock
        self._started_s = clock() if started_s is None else started_s
        self._max_num_batched_tokens = max_num_batched_tokens
        self._info: ExecutorInfo | None = None
        self._steps = EngineSteps()
        self._fronts = RequestCounts()
        self._ttft, self._queue, self._total = DurationWindow(), DurationWindow(), DurationWindow()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._is_draining = False

    def begin_drain(self) -> None:
        """Report the service as draining from now on, before the heartbeats of the fronts do."""
        self._is_draining = True

    def add_records(self, records: Sequence[RequestRecord]) -> None:
        """Add the token counts and latencies of ended requests."""
        if not records:
            return
        now_s = self._clock()
        admitted = [record for record in records if _was_admitted(record)]
        self._num_prompt_tokens += sum(record.num_prompt_tokens for record in admitted)
        self._num_cached_tokens += sum(record.num_cached_tokens for record in admitted)
        queued = [record for record in records if record.num_ahead >= 0]
        # NaN is ignored: a request without a token has no TTFT.
        self._ttft.add(now_s, [record.ttft_s for record in records])
        self._queue.add(now_s, [_queue_s(record) for record in queued])
        self._total.add(now_s, [record.end_s - record.arrival_s for record in queued])

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Store the heartbeat of a front.

        Also clears the load of the engine if no front is connected to an engine, or if no request
        is live and the last step ended over a second ago.
        """
        self._fronts.add_heartbeat(heartbeat)
        live = self._fronts.live
        if not any(front.is_engine_up for front in live):
            self._steps.engine_lost()
        elif not any(front.num_live for front in live) and self._is_settled():
            self._steps.clear_live_requests()

    def set_engine(self, hello: EngineHello) -> None:
        """Store the description of the executor (`ExecutorInfo`) from the engine's first frame."""
        self._info = hello.executor

    def add_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        """Add steps of the engine of `epoch`. `num_missed` is the number of earlier steps that were
        not read."""
        del totals  # The steps that were read are sufficient here.
        self._steps.add_steps(epoch, rows, num_missed)

    def front_disconnected(self, front_id: int) -> None:
        """Remove a front that has ended from the snapshot. Its counts are kept."""
        self._fronts.front_disconnected(front_id)

    def snapshot(self) -> Snapshot:
        """Return the current state of the service."""
        live = self._fronts.live
        # A single draining front is being replaced, and the service continues.
        is_draining = bool(live) and all(heartbeat.is_draining for heartbeat in live)
        return Snapshot(
            time_s=self._unix_clock(),
            uptime_s=max(0.0, self._clock() - self._started_s),
            is_draining=self._is_draining or is_draining,
            models=(self._model_snapshot(live),),
            fronts=self._fronts.views(),
        )

    def _model_snapshot(self, live: Sequence[Heartbeat]) -> ModelSnapshot:
        now_s = self._clock()
        steps, info, counts = self._steps, self._info, self._fronts.counts
        epoch = max([steps.epoch, *(heartbeat.epoch for heartbeat in live)])
        rates = steps.rates(now_s)
        return ModelSnapshot(
            model=self._model,
            is_up=any(heartbeat.is_engine_up for heartbeat in live),
            epoch=epoch,
            num_pending=steps.num_waiting,
            num_processing=steps.num_running,
            max_num_seqs=0 if info is None else info.max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            cache=self._cache(),
            num_accepted=counts["accepted"],
            num_rejected=counts["rejected"],
            num_completed=counts["completed"],
            num_cancelled=counts["cancelled"],
            num_failed=counts["failed"],
            num_preemptions=steps.num_preempted,
            num_steps=steps.num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_tokens,
            num_completion_tokens=steps.num_tokens,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_tokens_per_s=rates.decode_tokens_per_s,
            mean_step_s=rates.mean_step_s,
            estimated_queue_s=self._estimate(now_s, live),
            # The supervisor numbers its engines from 1.
            num_engine_restarts=max(0, epoch - 1),
            ttft=self._ttft.percentiles(now_s),
            itl=steps.itl(now_s),
            queue=self._queue.percentiles(now_s),
            total=self._total.percentiles(now_s),
            waits_for=steps.waits_for,
        )

    def _cache(self) -> CacheSnapshot:
        """Return the state of the KV cache.

        All blocks of an engine that has not run a step yet are free.
        """
        steps, info = self._steps, self._info
        block_size, num_blocks = (0, 0) if info is None else (info.block_size, info.num_blocks)
        num_seen = steps.num_used_blocks + steps.num_cached_blocks + steps.num_free_blocks
        return CacheSnapshot(
            block_size_tokens=block_size,
            num_total_blocks=num_seen or num_blocks,
            num_used_blocks=steps.num_used_blocks,
            num_cached_blocks=steps.num_cached_blocks,
            num_free_blocks=steps.num_free_blocks if num_seen else num_blocks,
        )

    def _estimate(self, now_s: float, live: Sequence[Heartbeat]) -> float | None:
        """Return the predicted wait in seconds of a request that arrives now; None if unknown.

        It is 0 if no request is queued and a slot is free. If requests are queued, it is the
        predicted wait of the most recently queued request, minus the time since the prediction. If
        that difference is negative while requests are queued, the prediction was wrong, and the
        result is None instead of 0. A prediction older than MAX_ESTIMATE_AGE_S is not used.
        """
        up = [heartbeat for heartbeat in live if heartbeat.is_engine_up]
        steps = self._steps
        if not up:
            return None
        if not steps.num_waiting:
            has_slot = self._info is not None and steps.num_running < self._info.max_num_seqs
            return 0.0 if has_slot else None
        newest = max(up, key=lambda heartbeat: heartbeat.queue_estimate_at_s)
        age_s = now_s - newest.queue_estimate_at_s
        if newest.queue_estimate_s is None or age_s > MAX_ESTIMATE_AGE_S:
            return None
        left_s = newest.queue_estimate_s - max(0.0, age_s)
        return left_s if left_s > 0.0 else None

    def _is_settled(self) -> bool:
        """Return True if the last step ended over a second ago. Fronts send a heartbeat every
        second, so their last heartbeats are then newer than the figures of the step."""
        return self._clock() - self._steps.updated_s > 1.0


def _was_admitted(record: RequestRecord) -> bool:
    return any(segment.kind is SegmentKind.PREFILL for segment in record.segments)


def _queue_s(record: RequestRecord) -> float:
    return math.fsum(
        segment.end_s - segment.start_s
        for segment in record.segments
        if segment.kind is SegmentKind.QUEUE
    )
