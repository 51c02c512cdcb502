"""The engine: schedule, launch, collect, update, again.

Owns the turn of one step and the only two things it joins, a scheduler and an executor. One thread
calls it. The clock is injected; it must be the one fronts stamp deadlines with.
"""

from collections.abc import Callable

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.integrity import check_integrity
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.state import RequestState


class Engine:
    """Runs requests on one executor."""

    def __init__(
        self, executor: Executor, config: SchedulerConfig, clock: Callable[[], float]
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(executor.info, config)
        self._clock = clock
        self._depth = executor.info.pipeline_depth
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or tell anything."""
        return self.scheduler.has_work

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
        scheduler = self.scheduler
        batch = scheduler.schedule(self._clock())
        if batch is not None:
            self._num_steps += 1
            self.executor.launch(batch)
        num_launched = scheduler.num_launched
        if num_launched and (batch is None or num_launched >= self._depth):
            result = self.executor.collect()
            scheduler.update(result, self._clock())
        return scheduler.take_events(self._num_steps, self._clock())

    def next_wakeup_s(self) -> float:
        """When a waiting request expires, engine clock; NO_TIME when none does."""
        return self.scheduler.life.queue.next_expiry_s()

    def check_integrity(self) -> None:
        """Raise IntegrityError when an invariant does not hold."""
        check_integrity(self.scheduler)

    def close(self) -> None:
        """Give the executor back."""
        self.executor.close()
