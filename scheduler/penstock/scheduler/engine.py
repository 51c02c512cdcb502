"""The engine: schedule, launch, collect, update, again.

Owns the turn of one step and the only two things it joins, a scheduler and an executor. One thread
calls it. The clock is injected; it must be the one fronts stamp deadlines with.
"""

from collections import deque
from collections.abc import Callable

from penstock.scheduler.batch import Batch
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.integrity import check_integrity
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.state import RequestState
from penstock.scheduler.step_measure import StepMeasure, measure_of


class Engine:
    """Runs requests on one executor.

    `on_measure` is told of every step that was timed; of a self-paced executor there is none.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        clock: Callable[[], float],
        on_measure: Callable[[StepMeasure], None] | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(executor.info, config)
        self._clock = clock
        self._depth = executor.info.pipeline_depth
        self._is_self_paced = executor.info.is_self_paced
        self._num_steps = 0
        self._on_measure = on_measure
        # When the launched steps were begun, oldest first, and when the last one was collected.
        self._begun_s: deque[float] = deque()
        self._collected_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or tell anything; of a self-paced executor: sooner or later."""
        return self.scheduler.has_work

    @property
    def ready_fd(self) -> int | None:
        """Of a self-paced executor: readable when a step has news to take; None for the others.

        With None a step is due while there is work. With one it is due when this is readable, when
        something was submitted or cancelled, and at `next_wakeup_s`.
        """
        return self.executor.ready_fd

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Queue the outputs of one request, leader first; refusals are told by the next step."""
        self.scheduler.submit(specs, self._clock())

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a live request now, in any state; False when there is none."""
        return self.scheduler.cancel(key, reason, self._clock())

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        """End every live output of a request.

        Returns where it stood, PROCESSING if any output was; None when there is none.
        """
        life = self.scheduler.life
        keys = life.keys_of(request_id)
        state = max((life.requests[key].state for key in keys), default=None)
        for key in keys:
            self.cancel(key)
        return state

    def step(self) -> StepEvents:
        """One turn; returns everything that happened since the last one.

        Returns at once when nobody can run. Whatever the executor raises comes through: it is
        dead, and so is this engine.
        """
        if self._is_self_paced:
            # What has arrived makes room for those who wait.
            self._collect()
            self._launch()
        else:
            batch = self._launch()
            num_launched = self.scheduler.num_launched
            if num_launched and (batch is None or num_launched >= self._depth):
                self._collect()
        return self.scheduler.take_events(self._num_steps, self._clock())

    def _launch(self) -> Batch | None:
        now = self._clock()
        batch = self.scheduler.schedule(now)
        if batch is not None:
            self._num_steps += 1
            self._begun_s.append(now)
            self.executor.launch(batch)
        return batch

    def _collect(self) -> None:
        result = self.executor.collect()
        if self._is_self_paced:
            self._begun_s.clear()
            if self.scheduler.num_launched:
                self.scheduler.update(result, self._clock())
            return
        now = self._clock()
        self._measure(now)
        self.scheduler.update(result, now)

    def _measure(self, now: float) -> None:
        """Time the step that was just collected, before it is forgotten."""
        begun_s = max(self._begun_s.popleft(), self._collected_s)
        self._collected_s = now
        batch = self.scheduler.oldest_batch
        if not batch.num_rows or now <= begun_s:
            return
        is_learning = self.scheduler.note_step(batch, now - begun_s, now)
        if is_learning or self._on_measure is not None:
            measure = measure_of(batch, now - begun_s)
            if is_learning:
                self.scheduler.learn(measure)
            if self._on_measure is not None:
                self._on_measure(measure)

    def next_wakeup_s(self) -> float:
        """When time ends a request, engine clock; NO_TIME when it never does."""
        return self.scheduler.life.next_expiry_s()

    def check_integrity(self) -> None:
        """Raise IntegrityError when an invariant does not hold."""
        check_integrity(self.scheduler)

    def close(self) -> None:
        """Give the executor back."""
        self.executor.close()
