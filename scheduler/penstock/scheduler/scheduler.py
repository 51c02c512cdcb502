"""The in-flight batching scheduler: `schedule` a step, `update` with its result.

Owns the pairing of launched steps with their results and the events of a turn. Pure: `now` is an
argument, seconds on the engine's clock.

    submit ─► queue ─► plan ─► Batch ─► (executor) ─► StepResult ─► apply ─► StepEvents
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch, StepResult, TokenLogprobs
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.events import NO_KEYS, NO_TOKENS, StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.flight import Flight
from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.planner import Planner
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.results import Results
from penstock.scheduler.step_measure import StepMeasure

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Scheduler:
    """Decides which requests run in each step, within the limits of one executor.

    Raises ValueError when the token budget is less than one token for every slot.
    """

    def __init__(self, info: ExecutorInfo, config: SchedulerConfig) -> None:
        if config.max_num_batched_tokens < info.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({info.max_num_seqs})"
            )
        self.life = Lifecycle(info, config)
        self._planner = Planner(self.life, info, config)
        self._results = Results(self.life, info)
        self._is_self_paced = info.is_self_paced

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return len(self.life.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are PENDING."""
        return len(self.life.queue)

    @property
    def num_launched(self) -> int:
        """Steps whose result is not in yet."""
        return len(self.life.flights)

    @property
    def has_work(self) -> bool:
        """Whether there are live requests, events to take, or releases for the executor."""
        life = self.life
        return bool(life.requests or life.flights or life.released or life.ends or life.changes)

    def submit(self, specs: tuple[RequestSpec, ...], now: float) -> None:
        """Queue the outputs of one request; a refusal becomes `Failed` ends."""
        self.life.submit(specs, now)

    def cancel(self, key: int, reason: FinishReason, now: float) -> bool:
        """End a live request at once, in any state; False when there is none."""
        request = self.life.requests.get(key)
        if request is None:
            return False
        self.life.finish(request, reason, now)
        return True

    @property
    def oldest_batch(self) -> Batch:
        """The launched step whose result is due next; there must be one."""
        return self.life.flights[0].batch

    @property
    def newest_flight(self) -> Flight:
        """The launched step that was planned last; there must be one."""
        return self.life.flights[-1]

    def note_step(self, batch: Batch, seconds: float, now: float) -> bool:
        """A step was timed; whether it is worth learning from."""
        has_prefill = batch.num_rows > batch.num_decodes
        has_paused = batch.num_paused > 0
        return self.life.outlook.note_step(
            seconds, now, has_prefill=has_prefill, has_paused=has_paused
        )

    def learn(self, measure: StepMeasure) -> None:
        """The content of a step, and its duration."""
        self.life.outlook.pace.learn(measure)

    def schedule(self, now: float) -> Batch | None:
        """Expire late requests, then plan the next step.

        None when no request can run and no slot was released since the last step.
        """
        self.life.expire(now)
        flight = self._planner.plan(now)
        if flight is None:
            return None
        # A self-paced executor returns no result for a step without rows.
        if flight.batch.num_rows or not self._is_self_paced:
            self.life.flights.append(flight)
        return flight.batch

    def update(self, result: StepResult, now: float) -> None:
        """Apply the result of the oldest launched step."""
        self._results.apply(self.life.flights.popleft(), result, now)

    def take_events(self, step: int, now: float) -> StepEvents:
        """All events since the last call."""
        life, results = self.life, self._results
        events = StepEvents(
            step=step,
            at_s=now,
            keys=_joined(results.keys, NO_KEYS),
            tokens=_joined(results.tokens, NO_TOKENS),
            logprobs=_joined_logprobs(results.logprobs),
            prompt_logprobs=tuple(results.prompt_logprobs),
            changes=tuple(life.changes),
            ends=tuple(life.ends),
        )
        for taken in (results.keys, results.tokens, results.logprobs, results.prompt_logprobs):
            taken.clear()
        life.changes.clear()
        life.ends.clear()
        return events


def _joined(parts: list[NDArray[_Scalar]], empty: NDArray[_Scalar]) -> NDArray[_Scalar]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else empty


def _joined_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return TokenLogprobs(
        chosen=np.concatenate([part.chosen for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
