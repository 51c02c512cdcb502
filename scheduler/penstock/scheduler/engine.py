"""The engine: schedule, launch, collect, update, repeat.

Owns one step's sequence and the only two parts it connects, a scheduler and an executor. One thread
calls it. The clock is injected; it must be the one that fronts use for deadlines.
"""

from collections import deque
from collections.abc import Callable, Mapping

from penstock.scheduler.batch import Batch
from penstock.scheduler.cache_book import CacheBook
from penstock.scheduler.config import SchedulerConfig, check_weights
from penstock.scheduler.cost_model import measure_of
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.integrity import IntegrityCheck, check_integrity
from penstock.scheduler.listener import EngineListener, StepWatch
from penstock.scheduler.live_view import LiveView, live_views
from penstock.scheduler.quotas import TenantQuota
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.state import RequestState


class Engine:
    """Runs requests on one executor.

    `listener` is called for every request, step and turn, before `step` returns the turn's events.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        clock: Callable[[], float],
        listener: EngineListener | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(executor.info, config)
        self._clock = clock
        self._depth = executor.info.pipeline_depth
        self._is_self_paced = executor.info.is_self_paced
        self._num_steps = 0
        self._watch = None if listener is None else StepWatch(self.scheduler, listener)
        self._check = IntegrityCheck(self.scheduler)
        # When the launched steps were begun, oldest first, and when the last one was collected.
        self._begun_s: deque[float] = deque()
        self._collected_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report anything; of a self-paced executor: sooner or later."""
        return self.scheduler.has_work

    @property
    def queue_size(self) -> tuple[int, int]:
        """How many requests wait, and the tokens that they would prefill."""
        queue = self.scheduler.life.queue
        return len(queue), queue.num_tokens

    @property
    def occupancy(self) -> tuple[int, int]:
        """How many requests run, and the blocks that requests use; not cached ones."""
        life = self.scheduler.life
        return len(life.running), life.cache.pool.num_used

    @property
    def retention_cuts(self) -> tuple[int, int]:
        """Requests whose retention was shortened, and blocks that lost theirs, to the budget."""
        cuts = self.scheduler.life.retention_cuts
        return cuts.num_shortened, cuts.num_dropped_blocks

    @property
    def ready_fd(self) -> int | None:
        """Of a self-paced executor: readable when it has results; None for the others.

        With None a step is due while there is work. With a descriptor one is due when that is
        readable, when a request was submitted or cancelled, and at `next_wakeup_s`.
        """
        return self.executor.ready_fd

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Queue the outputs of one request, leader first; refusals are reported by the next
        step.
        """
        self._check.restart()
        if self._watch is not None:
            self._watch.submit(specs)
        self.scheduler.submit(specs, self._clock())

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a live request now, in any state; False when there is none."""
        self._check.restart()
        return self.scheduler.cancel(key, reason, self._clock())

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        """End every live output of a request.

        Returns its state, PROCESSING if any output was; None when there is none.
        """
        life = self.scheduler.life
        keys = life.keys_of(request_id)
        state = max((life.requests[key].state for key in keys), default=None)
        for key in keys:
            self.cancel(key)
        return state

    def step(self) -> StepEvents:
        """One step; returns everything that happened since the last one.

        Returns at once when no request can run. Exceptions of the executor propagate: it is dead,
        and so is this engine.
        """
        self._check.restart()
        if self._is_self_paced:
            # Arrived results free resources for waiting requests.
            self._collect()
            self._launch()
        else:
            batch = self._launch()
            num_launched = self.scheduler.num_launched
            if num_launched and (batch is None or num_launched >= self._depth):
                self._collect()
        events = self.scheduler.take_events(self._num_steps, self._clock())
        if self._watch is not None:
            self._watch.turned(events)
        return events

    def _launch(self) -> Batch | None:
        now = self._clock()
        batch = self.scheduler.schedule(now)
        if batch is not None:
            self._num_steps += 1
            self._begun_s.append(now)
            # A self-paced executor returns nothing for a step without rows.
            if self._watch is not None and (batch.num_rows or not self._is_self_paced):
                self._watch.launch(self.scheduler.newest_flight, now, self._clock())
            self.executor.launch(batch)
        return batch

    def _collect(self) -> None:
        result = self.executor.collect()
        if self._is_self_paced:
            self._begun_s.clear()
            if not self.scheduler.num_launched:
                return
        now = self._clock()
        if not self._is_self_paced:
            self._measure(now)
        self.scheduler.update(result, now)
        if self._watch is not None:
            self._watch.collected(now, self._clock())

    def _measure(self, now: float) -> None:
        """Time the step that was just collected, before it is forgotten."""
        begun_s = max(self._begun_s.popleft(), self._collected_s)
        self._collected_s = now
        batch = self.scheduler.oldest_batch
        if not batch.num_rows or now <= begun_s:
            return
        if self.scheduler.note_step(batch, now - begun_s, now):
            self.scheduler.learn(measure_of(batch, now - begun_s))

    def next_wakeup_s(self) -> float:
        """When time ends a request, engine clock; NO_TIME when it never does."""
        return self.scheduler.life.next_expiry_s()

    def set_quotas(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        """Replace the tenants' limits; `default` applies to those that `quotas` does not name.

        Live requests stay; from now on new requests are checked against the new limits.
        """
        self.scheduler.life.quotas.set_quotas(quotas, default)

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:
        """Replace the tenants' weights; `default` applies to those that `weights` does not name.

        Past service keeps its value. Raises ValueError.
        """
        check_weights(weights)
        check_weights({"": default})
        self.scheduler.life.tenants.set_weights(weights, default)
        self.scheduler.life.queue.sums.set_weights(weights, default)

    def keep_cache_book(self) -> CacheBook:
        """From now on index cached blocks. Call it before anything is submitted.

        Raises ValueError for a self-paced executor, which has its own cache.
        """
        if self._is_self_paced:
            raise ValueError("a self-paced executor keeps its own cache")
        return self.scheduler.life.cache.keep_book()

    def look(self) -> tuple[LiveView, ...]:
        """All live requests: running ones, most senior first, then waiting ones, in order.

        May take milliseconds: for operators, not for every step.
        """
        return live_views(self.scheduler.life)

    def check_integrity(self) -> None:
        """Raise IntegrityError when an invariant does not hold."""
        check_integrity(self.scheduler)

    def check_next_piece(self) -> bool:
        """A part of `check_integrity`, under a millisecond; True when everything has been checked.

        After the engine was busy, the check of an idle engine starts again, except that blocks
        continue where it stopped.
        """
        return self._check.advance()

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()
