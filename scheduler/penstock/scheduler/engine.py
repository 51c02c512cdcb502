"""The engine. Each step schedules a batch, launches it, collects a result and updates the requests.

Owns the components of the core, defines the sequence of a step, and calls one executor. It is
called from one thread. The clock is injected and must be the one that fronts (gRPC server
processes) use for deadlines. `schedule`, `update` and `submit_at` do not read it: `now` is an
argument, seconds on that clock.

    submit ─► queue ─► plan ─► Batch ─► (executor) ─► StepResult ─► apply ─► StepEvents
"""

from collections import deque
from collections.abc import Callable, Mapping

from penstock.scheduler.admission_blocks import AdmissionBlocks
from penstock.scheduler.admission_control import AdmissionControl
from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.batch_admission import BatchAdmission
from penstock.scheduler.cache_index import CacheIndex
from penstock.scheduler.completion import CompletionPredictor
from penstock.scheduler.config import (
    SchedulerConfig,
    SchedulingOrder,
    check_step_tokens,
    check_weights,
)
from penstock.scheduler.cost_model import measure_of
from penstock.scheduler.deadline_predictor import DeadlinePredictor
from penstock.scheduler.displacement import Displacement
from penstock.scheduler.events import EventBuffer, StepEvents
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.scheduler.integrity import CheckedParts, IntegrityCheck
from penstock.scheduler.kv_cache import cache_of
from penstock.scheduler.launched_step import LaunchedSteps
from penstock.scheduler.listener import EngineListener, StepWatch
from penstock.scheduler.output_view import OutputView, output_views
from penstock.scheduler.planner import Planner
from penstock.scheduler.quotas import QuotaAccounts, TenantQuota
from penstock.scheduler.request import FailureReason, FinishReason, Request, RequestSpec
from penstock.scheduler.results import Results
from penstock.scheduler.retention import EngineRetention
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.state import RequestState
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.transitions import LiveRequests, Transitions, failed
from penstock.scheduler.victims import VictimSelection
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue
from penstock.scheduler.waiting_sums import WaitingSums


class Engine:
    """Runs requests on one executor.

    `listener` is called for every request and every step, before `step` returns its events. Raises
    ValueError if `max_num_batched_tokens` is less than the number of slots, or if there is an
    inter-token latency target with a self-paced executor (see `ExecutorInfo`).

    Attributes:
        requests: The live requests by key, PENDING and PROCESSING.
        queue: The PENDING requests.
        running, arrays, cache: The slots and blocks of the PROCESSING requests.
        tenants, quotas: The service that each tenant has received, and the use of its quotas.
        sizing: The cost model of a step, and the limits computed from it.
        completion: Predicts the probability that an output is complete before its deadline.
        predictor: Predicts queue times and missed deadlines.
        launched: The steps in flight.
        events: The events that `step` has not returned yet.
        transitions: Moves requests between states.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        clock: Callable[[], float],
        listener: EngineListener | None = None,
    ) -> None:
        info = executor.info
        check_step_tokens(
            config.max_num_batched_tokens,
            info.max_num_seqs,
            "max_num_batched_tokens",
            "max_num_seqs",
        )
        self.executor = executor
        self.requests = LiveRequests()
        self.events = EventBuffer()
        self.launched = LaunchedSteps()
        self.arrays = _arrays_of(info)
        self.cache = cache_of(info, config, self.arrays)
        self.running = RunningSet(self.arrays)
        self.tenants = TenantCounters(config)
        self.quotas = QuotaAccounts({}, config.tenant_quota)
        is_fair = config.order is SchedulingOrder.FAIR
        self._displacement = Displacement(config, self.tenants)
        self._sums = WaitingSums(config)
        self._waits = WaitClock()
        self.queue = WaitingQueue(
            config,
            tenants=self.tenants,
            displacement=self._displacement,
            sums=self._sums,
            waits=self._waits,
        )
        self.sizing = StepSizing(info, config)
        self.completion = CompletionPredictor(
            config.min_deadline_chance, self.sizing.fit, arrays=self.arrays, running=self.running
        )
        blocks = AdmissionBlocks(info, config, self.cache, self.running)
        self.predictor = DeadlinePredictor(
            config,
            sizing=self.sizing,
            completion=self.completion,
            arrays=self.arrays,
            cache=self.cache,
            blocks=blocks,
            running=self.running,
            queue=self.queue,
            sums=self._sums,
            tenants=self.tenants,
        )
        self.transitions = self._transitions(config)
        self._admission_control = AdmissionControl(
            info,
            config,
            cache=self.cache,
            queue=self.queue,
            displacement=self._displacement,
            tenants=self.tenants,
            quotas=self.quotas,
            predictor=self.predictor,
            requests=self.requests,
        )
        self._planner = self._planner_of(info, config, blocks)
        self._results = Results(
            info,
            arrays=self.arrays,
            cache=self.cache,
            running=self.running,
            queue=self.queue,
            tenants=self.tenants if is_fair else None,
            quotas=self.quotas,
            transitions=self.transitions,
            events=self.events,
        )
        self._integrity = IntegrityCheck(self._checked_parts())
        self._watch = None if listener is None else self._watch_of(listener)
        self._retention = EngineRetention(config, info) if info.is_self_paced else None
        self._clock = clock
        self._depth = info.pipeline_depth
        self._is_self_paced = info.is_self_paced
        self._next_sequence = 0
        self._num_steps = 0
        # Start times of the launched steps, oldest first, and when the last one was collected.
        self._begun_s: deque[float] = deque()
        self._collected_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` is needed: requests are live, a step is in flight, or released
        slots or events have not been reported yet.
        """
        return bool(
            self.requests
            or len(self.launched)
            or self.running.has_released
            or self.events.ends
            or self.events.changes
        )

    @property
    def queue_size(self) -> tuple[int, int]:
        """The number of waiting requests, and the number of their tokens, cached ones included."""
        return len(self.queue), self.queue.num_tokens

    @property
    def occupancy(self) -> tuple[int, int]:
        """The number of running requests, and the number of blocks that they use; unused cached
        blocks are not counted.
        """
        return len(self.running), self.cache.pool.num_used

    @property
    def retention_cuts(self) -> tuple[int, int]:
        """How often the retention limits applied: the number of retentions that were shortened, and
        the number of blocks that lost or did not get a retention.
        """
        retention = self._retention
        cuts = self.cache.pool.retention_cuts if retention is None else retention.cuts
        return cuts.num_shortened, cuts.num_dropped_blocks

    @property
    def ready_fd(self) -> int | None:
        """A descriptor that is readable when a self-paced executor has results; None for others.

        If this is None, call `step` while there is work. Otherwise call `step` when the descriptor
        is readable, when a request was submitted or cancelled, and at `next_wakeup_s`.
        """
        return self.executor.ready_fd

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Submit the specs of one request's outputs, in order; all of them join the queue or none.

        If the request is rejected, the next step returns one `Failed` event per spec.
        """
        self._integrity.restart()
        if self._watch is not None:
            self._watch.submit(specs)
        self.submit_at(specs, self._clock())

    def submit_at(self, specs: tuple[RequestSpec, ...], now: float) -> None:
        """Submit at time `now`, without notifying the listener; see `submit`."""
        if self._retention is not None:
            specs = self._retention.limit(specs, now)
        outputs = [
            Request(
                spec=spec,
                sequence=sequence,
                tokens=spec.prompt_ids,
                block_hashes=list(spec.block_hashes),
                is_trial=spec.num_replays > 0,
            )
            for sequence, spec in enumerate(specs, self._next_sequence)
        ]
        estimate = self._admission_control.check(outputs, now)
        if estimate.rejection is not None:
            self.events.ends.extend(failed(spec, now, estimate.rejection) for spec in specs)
            return
        for request in estimate.displaced:
            rejection = self.predictor.limit_rejection(request, FailureReason.QUEUE_FULL, now)
            self.quotas.refund(request.spec)
            self.transitions.fail(request, rejection, now)
        self._next_sequence += len(specs)
        self.transitions.enqueue(outputs, estimate, now)

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End the live request with this key now, in any state; return False if there is none."""
        self._integrity.restart()
        request = self.requests.get(key)
        if request is None:
            return False
        self.transitions.finish(request, reason, self._clock())
        return True

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        """End every live output of a request as CANCELLED.

        Return the state that it had: PROCESSING if any output was running, None if none was live.
        """
        keys = self.requests.keys_of(request_id)
        state = max((self.requests[key].state for key in keys), default=None)
        for key in keys:
            self.cancel(key)
        return state

    def step(self) -> StepEvents:
        """Run one step; return all events since the last call.

        Returns without waiting if no request can run and no step is in flight. Exceptions of the
        executor propagate: the executor and this engine have failed.
        """
        self._integrity.restart()
        if self._is_self_paced:
            # Results that have arrived may free slots and blocks for waiting requests.
            self._collect()
            self._launch()
        else:
            batch = self._launch()
            num_launched = len(self.launched)
            if num_launched and (batch is None or num_launched >= self._depth):
                self._collect()
        events = self.events.take(self._num_steps, self._clock())
        if self._watch is not None:
            self._watch.iteration_ended(events)
        return events

    def schedule(self, now: float) -> Batch | None:
        """Expire late requests, then plan the next step.

        Return None if no request can run and no slot was released since the last step.
        """
        self.transitions.expire(now)
        step = self._planner.plan(now)
        if step is None:
            return None
        # A self-paced executor returns no result for a step without rows.
        if step.batch.num_rows or not self._is_self_paced:
            self.launched.append(step)
        return step.batch

    def update(self, result: StepResult, now: float) -> None:
        """Apply the result of the oldest launched step; raise ValueError if it does not fit the
        batch.
        """
        self._results.apply(self.launched.pop_oldest(), result, now)

    def note_duration(self, batch: Batch, seconds: float, now: float) -> None:
        """Record the duration of a step, and learn the cost model from it. `seconds`: from the
        start of the step, or the end of the previous one if that is later, to its result.
        """
        has_prefill = batch.num_rows > batch.num_decodes
        self.completion.token_time.note_step(seconds, now, has_paused=batch.num_paused > 0)
        if self.sizing.note_step(seconds, now, has_prefill=has_prefill):
            self.sizing.learn(measure_of(batch, seconds))

    def _launch(self) -> Batch | None:
        now = self._clock()
        batch = self.schedule(now)
        if batch is not None:
            self._num_steps += 1
            self._begun_s.append(now)
            # A self-paced executor returns nothing for a step without rows.
            if self._watch is not None and (batch.num_rows or not self._is_self_paced):
                self._watch.launch(self.launched.newest, now, self._clock())
            self.executor.launch(batch)
        return batch

    def _collect(self) -> None:
        result = self.executor.collect()
        if self._is_self_paced:
            self._begun_s.clear()
            if not len(self.launched):
                return
        now = self._clock()
        if not self._is_self_paced:
            self._measure(now)
        self.update(result, now)
        if self._watch is not None:
            self._watch.collected(now, self._clock())

    def _measure(self, now: float) -> None:
        """Record the duration of the step that was just collected; call it before the step is
        removed.
        """
        begun_s = max(self._begun_s.popleft(), self._collected_s)
        self._collected_s = now
        batch = self.launched.oldest.batch
        if batch.num_rows and now > begun_s:
            self.note_duration(batch, now - begun_s, now)

    def next_wakeup_s(self) -> float:
        """Return the next time, on the engine clock, at which a request may expire or be dropped
        for its deadlines; NO_TIME if there is none.
        """
        return self.transitions.next_expiry_s()

    def set_quotas(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        """Replace the tenants' limits; `default` applies to tenants that are not in `quotas`.

        Live requests are not affected; new requests are checked against the new limits.
        """
        self.quotas.set_quotas(quotas, default)

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:
        """Replace the tenants' weights; `default` applies to tenants that are not in `weights`.

        Recorded service is not recomputed. Raises SettingError for a weight out of range.
        """
        check_weights(weights)
        check_weights({"": default})
        self.tenants.set_weights(weights, default)
        self._sums.set_weights(weights, default)

    def enable_cache_index(self) -> CacheIndex:
        """Start to index cached blocks; return the index. Call it before the first request is
        submitted.

        Raises ValueError for a self-paced executor, which has its own cache.
        """
        if self._is_self_paced:
            raise ValueError("a self-paced executor keeps its own cache")
        return self.cache.enable_cache_index()

    def output_views(self) -> tuple[OutputView, ...]:
        """Return a view of every live request: running ones, the highest class and earliest arrival
        first, then waiting ones, in order.

        May take milliseconds; meant for operators, not for every step.
        """
        return output_views(self.arrays, self.running, self.queue, self._waits)

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant does not hold."""
        self._integrity.check_all()

    def check_next_piece(self) -> bool:
        """Run the next part of `check_integrity`; return True once everything is checked.

        On an idle engine a part takes under a millisecond. Raises IntegrityError if an invariant
        does not hold. After a busy period the check starts again, except that the check of blocks
        continues at the block where it stopped.
        """
        return self._integrity.advance()

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()

    def _transitions(self, config: SchedulerConfig) -> Transitions:
        return Transitions(
            config,
            requests=self.requests,
            arrays=self.arrays,
            cache=self.cache,
            running=self.running,
            launched=self.launched,
            queue=self.queue,
            displacement=self._displacement,
            waits=self._waits,
            tenants=self.tenants,
            quotas=self.quotas,
            predictor=self.predictor,
            completion=self.completion,
            events=self.events,
        )

    def _planner_of(
        self, info: ExecutorInfo, config: SchedulerConfig, blocks: AdmissionBlocks
    ) -> Planner:
        victims = VictimSelection(self.arrays, self.cache, self.running, self.tenants)
        admission = BatchAdmission(
            info,
            config,
            cache=self.cache,
            blocks=blocks,
            running=self.running,
            queue=self.queue,
            sizing=self.sizing,
            predictor=self.predictor,
            victims=victims,
            transitions=self.transitions,
        )
        return Planner(
            info,
            config,
            arrays=self.arrays,
            cache=self.cache,
            running=self.running,
            queue=self.queue,
            waits=self._waits,
            tenants=self.tenants,
            sizing=self.sizing,
            predictor=self.predictor,
            victims=victims,
            admission=admission,
            transitions=self.transitions,
        )

    def _checked_parts(self) -> CheckedParts:
        return CheckedParts(
            requests=self.requests,
            arrays=self.arrays,
            cache=self.cache,
            running=self.running,
            launched=self.launched,
            queue=self.queue,
            tenants=self.tenants,
            quotas=self.quotas,
            predictor=self.predictor,
        )

    def _watch_of(self, listener: EngineListener) -> StepWatch:
        return StepWatch(
            listener,
            cache=self.cache,
            running=self.running,
            queue=self.queue,
            waits=self._waits,
            sizing=self.sizing,
        )


def _arrays_of(info: ExecutorInfo) -> SlotArrays:
    return SlotArrays(
        num_slots=info.max_num_seqs,
        # A row is never longer than the whole cache plus the last token, which is not computed,
        # even if the model's limit is higher.
        max_seq_len=min(info.max_seq_len, info.num_blocks * info.block_size + 1),
        block_size=info.block_size,
    )
