"""Predicts whether a request meets its deadlines, and how long it will wait.

Owns the decision: it examines running and waiting requests, uses `forecast.py`, and determines
which requests are refused or dropped and what is reported to them. Does not end any request itself,
and has no clock.

- **At submission** a request is refused when it would be late after its expected queue time
  (`forecast`, less the error of the cost model) and then its prefill alone on the machine.
- **In the queue** it is dropped once it would be late even with the whole machine to itself
  (`forecast_alone`).
- **At admission** it is dropped when it would be late next to the running requests: the last moment
  before compute is spent on it.
- **Complete outputs** are predicted by probability as well (`completion.py`): at submission, at
  admission and, a few times a second, while they run.

A prefix that is in the cache, or that a live request may be computing, counts as found. Nothing is
predicted for a self-paced executor, or for a `time_limit`, since reaching it is not a failure.
Steps of a kind whose cost is not known well (with prefill, without) refuse no request, nor does a
cost model that no step has confirmed for a second on an idle machine: the request is then admitted
as a trial.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.scheduler.completion import CompletionPredictor
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.contention import Contention
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.forecast import (
    Deadlines,
    Demand,
    Forecast,
    Load,
    Machine,
    QueuedAhead,
    deadlines_of,
    forecast,
    forecast_alone,
    hopeless_at_s,
    retry_after_s,
)
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.live_prefixes import LivePrefixes
from penstock.scheduler.quotas import QuotaBreach
from penstock.scheduler.request import NO_TIME, FailureReason, Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.waiting_queue import WaitingQueue

_TRIAL_AFTER_S = 1.0
_SPARE_STEPS = 2
"""A prompt is urgent if it would be late after this many full steps for others."""
_FAR = 20.0
"""A deadline is far if it leaves time for this many times the steps that the request needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a request is refused or dropped, and the reported values: see `events.Failed`."""

    reason: FailureReason
    estimate_s: float | None = None
    deadline_s: float | None = None
    chance: float | None = None
    retry_after_s: float | None = None
    breach: QuotaBreach | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEstimate:
    """The prediction for an arriving request: see `events.Queued`; `rejection`: why to reject it,
    None to admit it. `displaced`: waiting requests that it displaces if admitted.
    """

    num_ahead: int
    queue_s: float | None = None
    rejection: Rejection | None = None
    displaced: tuple[Request, ...] = ()


class DeadlinePredictor:
    """Predicts whether the requests of one engine meet their deadlines."""

    def __init__(  # noqa: PLR0913 - each is one thing that a prediction depends on
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        *,
        sizing: StepSizing,
        completion: CompletionPredictor,
        arrays: SlotArrays,
        cache: KVCache,
        running: RunningSet,
        queue: WaitingQueue,
        tenants: Tenants,
    ) -> None:
        self._sizing = sizing
        self._completion = completion
        self._contention = Contention(
            config,
            sizing,
            completion.lengths,
            arrays=arrays,
            cache=cache,
            running=running,
            queue=queue,
            tenants=tenants,
        )
        self._prefixes = LivePrefixes()
        self._arrays = arrays
        self._cache = cache
        self._running = running
        self._queue = queue
        self._is_predicting = config.deadline_admission
        self._is_guaranteed = config.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
        self._info = info
        self._max_tokens = config.max_num_batched_tokens

    def prepare(self, request: Request) -> None:
        """Record the demand of a request that is about to wait, and the time at which to check it
        again.
        """
        spec, num_tokens = request.spec, len(request.tokens)
        request.num_kept_tokens = num_tokens
        if self._is_guaranteed:
            request.num_kept_tokens = self._info.num_kept_tokens(spec.max_total_tokens)
        request.num_expected_tokens = round(self._expected_tokens(request))
        request.num_uncached_tokens = num_tokens
        request.recheck_s = min(spec.time_limit_s, deadlines_of(request).earliest_s)
        if not self._sizing.has_cost:
            return
        matched = self._cache.match(request)
        request.num_uncached_tokens = self._demand(request, matched).num_prefill_tokens
        if self._is_predicting:
            if not request.num_preemptions:
                self._prefixes.add(request, len(matched))
            request.recheck_s = min(spec.time_limit_s, self._hopeless_s(request, matched))

    def forget(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._prefixes.remove(request)

    def faults(self, live: Mapping[int, Request]) -> list[str]:
        """Return the inconsistencies, given the live requests."""
        return self._prefixes.faults(live)

    def estimate(self, request: Request, now: float) -> QueueEstimate:
        """Return the prediction for a request that is about to join the queue, and whether to
        reject it.
        """
        if not self._sizing.has_cost:
            return QueueEstimate(num_ahead=self._queue.ahead_of(request, 0).num_requests)
        deadlines = deadlines_of(request)
        if deadlines.total_s != NO_TIME:
            has_line = self._queue.has_line(request)
            self._completion.note_arrival(request, now, finds_queue=has_line)
        is_judged = deadlines.is_any and self._is_able
        if not (is_judged or len(self._queue)) and self._has_place:
            return QueueEstimate(num_ahead=0, queue_s=0.0)
        machine = self._machine()
        matched = self._cache.match(request)
        demand = self._demand(request, matched)
        load, ahead = self._contention.of_arrival(request, demand)
        likely = forecast(machine, demand, load, ahead)
        rejection = None
        if is_judged and not self._is_trial(request, now):
            alone = forecast_alone(machine, demand)
            optimistic = replace(alone, queue_s=likely.queue_left * likely.queue_s)
            rejection = self._rejection(request, demand, load, likely, optimistic, now)
            if rejection is not None and (
                self._prefixes.is_wanted(request, len(matched))
                or self._is_exploring(request, rejection)
            ):
                rejection = None
        return QueueEstimate(
            num_ahead=ahead.num_requests, queue_s=likely.queue_s, rejection=rejection
        )

    def hopeless_s(self, request: Request) -> float:
        """Return when a waiting request can no longer meet its deadlines, as predicted now.

        NO_TIME for never. A prefix that another request may compute counts as found.
        """
        matched = self._cache.match(request)
        if self._prefixes.is_wanted(request, len(matched)):
            return deadlines_of(request).earliest_s
        return self._hopeless_s(request, matched)

    def dropped(self, request: Request, now: float) -> Rejection:
        """Return the rejection of a request at its `hopeless_s`."""
        deadlines = deadlines_of(request)
        if not self._sizing.has_cost:
            return Rejection(reason=deadlines.passed_by(now))
        demand = self._demand(request, self._cache.match(request))
        load, ahead = self._contention.of_arrival(request, demand)
        likely = forecast(self._machine(), demand, load, ahead)
        rejection = self._late(request, demand, likely, likely, now)
        is_over = deadlines.earliest_s <= now
        return replace(rejection, reason=deadlines.passed_by(now)) if is_over else rejection

    def crowded(self, request: Request, reason: FailureReason, now: float) -> Rejection:
        """Return the rejection of a request that does not fit into the queue."""
        if not self._sizing.has_cost:
            return Rejection(reason=reason)
        demand = self._demand(request, self._cache.match(request))
        load, ahead = self._contention.of_arrival(request, demand)
        likely = forecast(self._machine(), demand, load, ahead)
        # The wait until requests with as much demand as this one have left the queue.
        leaving = QueuedAhead(
            num_requests=1,
            num_prefill_tokens=demand.num_prefill_tokens,
            num_blocks=demand.num_blocks,
            num_output_tokens=demand.expected_output_tokens,
        )
        until = forecast(self._machine(), demand, load, leaving)
        return Rejection(
            reason=reason, estimate_s=likely.ttft_s, retry_after_s=retry_after_s(until, now)
        )

    def check_at_admission(
        self, request: Request, matched: list[int], now: float
    ) -> Rejection | None:
        """Return the rejection of a request that could run now; None to admit it.

        It is predicted to take the time of `forecast`, next to the running requests and with the
        present prefill budget, less the error of the cost model.
        """
        deadlines = deadlines_of(request)
        if not (deadlines.is_any and self._is_able) or request.is_trial:
            return None
        if self._is_far(request, deadlines, now):
            return None
        machine, demand = self._machine(), self._demand(request, matched)
        load = self._contention.of_admission(request, demand)
        likely = forecast(machine, demand, load, QueuedAhead())
        alone = forecast_alone(machine, demand)
        optimistic = Forecast(
            queue_s=likely.queue_left * likely.queue_s,
            prefill_s=likely.prefill_left * likely.prefill_s,
            decode_s=alone.decode_s,
        )
        return self._rejection(request, demand, load, likely, optimistic, now)

    def given_up(self, now: float) -> list[tuple[Request, Rejection]]:
        """Return running requests with less than the minimum chance to end before their deadlines.

        Checked at intervals; empty in between.
        """
        if not (self._is_able and self._completion.is_check_due(now)):
            return []
        load = self._contention.load()
        token_s = self._completion.token_time.beside(load, now)
        found: list[tuple[Request, Rejection]] = []
        for request, chance in self._completion.running_late(token_s, now):
            demand = self._demand(request, [])
            likely = forecast(self._machine(), demand, load, QueuedAhead())
            done_s = now + demand.min_output_tokens * token_s
            found.append((request, self._unlikely(request, demand, likely, chance, done_s)))
        return found

    def urgent(self, under_way: Iterable[Request], now: float) -> dict[int, float]:
        """Return slot and deadline of prompts that will be late unless they get whole steps from
        now on.

        Several long prompts that share every step may all be late where, one after the other, some
        would be in time.
        """
        due = {request.slot: deadlines_of(request).ttft_s for request in under_way}
        due = {slot: due_s for slot, due_s in due.items() if due_s != NO_TIME}
        if not (due and self._is_able):
            return {}
        load, arrays, machine = self._contention.load(), self._arrays, self._machine()
        num_spare = _SPARE_STEPS * load.prefill_budget_tokens
        urgent: dict[int, float] = {}
        for slot, due_s in due.items():
            num_done = int(arrays.num_computed[slot])
            num_left = int(arrays.num_tokens[slot]) - num_done
            demand = Demand(num_prefill_tokens=num_left + num_spare, num_cached_tokens=num_done)
            if now + forecast(machine, demand, load, QueuedAhead()).prefill_s > due_s:
                urgent[slot] = due_s
        return urgent

    def _is_far(self, request: Request, deadlines: Deadlines, now: float) -> bool:
        """Whether a deadline is so far away that no prediction is needed, to save its cost."""
        num_tokens, spec = len(request.tokens), request.spec
        is_judged = deadlines.total_s != NO_TIME and self._completion.min_chance > 0.0
        num_output = spec.max_tokens if is_judged else spec.min_tokens
        num_steps = 2 * num_tokens // self._sizing.prefill_budget_tokens + num_output + 2
        left_s = deadlines.earliest_s - now
        return left_s > _FAR * num_steps * self._sizing.last_step_s

    @property
    def _has_place(self) -> bool:
        return len(self._running) < self._sizing.max_num_running

    @property
    def _is_able(self) -> bool:
        return self._is_predicting and self._sizing.has_cost

    def _is_trial(self, request: Request, now: float) -> bool:
        """Whether this request is admitted to measure whether the machine's speed has changed.

        If old measurements refused all requests, no request would run to correct the measurements.
        """
        is_idle = not (len(self._running) or len(self._queue))
        is_due = is_idle and now - self._sizing.last_step_at_s >= _TRIAL_AFTER_S
        request.is_trial = request.is_trial or is_due
        return request.is_trial

    def _is_exploring(self, request: Request, rejection: Rejection) -> bool:
        """Whether this request is admitted to measure whether output lengths have changed."""
        chance, judge = rejection.chance, self._completion
        is_learned = chance is not None and 0.0 < chance < judge.min_chance
        request.is_trial = is_learned and judge.exploration.takes_unlikely(request.spec.tenant)
        return request.is_trial

    def _hopeless_s(self, request: Request, matched: list[int]) -> float:
        deadlines = deadlines_of(request)
        if not (deadlines.is_any and self._is_able) or request.is_trial:
            return deadlines.earliest_s
        return hopeless_at_s(
            self._machine(),
            self._demand(request, matched),
            ttft_deadline_s=deadlines.ttft_s,
            deadline_s=deadlines.total_s,
        )

    def _rejection(
        self,
        request: Request,
        demand: Demand,
        load: Load,
        likely: Forecast,
        optimistic: Forecast,
        now: float,
    ) -> Rejection | None:
        """Return the rejection of a request whose best case is `optimistic`; None to admit it."""
        if not deadlines_of(request).are_met(optimistic, now):
            return self._late(request, demand, likely, optimistic, now)
        if request.spec.deadline_s == NO_TIME:
            return None
        completion = self._completion.assess(
            request,
            queue_s=optimistic.queue_s,
            prefill_s=likely.prefill_left * likely.prefill_s,
            token_s=self._completion.token_time.beside(load, now),
            now=now,
        )
        if completion is None or completion.chance >= completion.required:
            return None
        done_s = now + completion.needed_s
        rejection = self._unlikely(request, demand, likely, completion.chance, done_s)
        wait_s = max(rejection.retry_after_s or 0.0, completion.slowdown_s)
        return replace(rejection, retry_after_s=wait_s)

    def _unlikely(
        self, request: Request, demand: Demand, likely: Forecast, chance: float, done_s: float
    ) -> Rejection:
        """Return the rejection of a request that will probably be late; `done_s`: its predicted
        end.
        """
        spec = request.spec
        alone = forecast_alone(self._machine(), demand)
        is_possible = spec.arrival_s + alone.total_s < spec.deadline_s
        return Rejection(
            reason=FailureReason.DEADLINE_UNREACHABLE,
            estimate_s=max(done_s, spec.deadline_s) - spec.arrival_s,
            deadline_s=spec.deadline_s - spec.arrival_s,
            chance=chance,
            retry_after_s=retry_after_s(likely, done_s) if is_possible else math.inf,
        )

    def _late(
        self, request: Request, demand: Demand, likely: Forecast, optimistic: Forecast, now: float
    ) -> Rejection:
        """Return the rejection of a request that is late even with `optimistic`. The reported
        values are those of `likely`.
        """
        deadlines, arrival_s = deadlines_of(request), request.spec.arrival_s
        is_ttft = now + optimistic.ttft_s >= deadlines.ttft_s
        needed_s = (
            max(likely.ttft_s, optimistic.ttft_s)
            if is_ttft
            else max(likely.total_s, optimistic.total_s)
        )
        alone = forecast_alone(self._machine(), demand)
        chance: float | None = None
        if not is_ttft:
            chance = self._completion.chance_in(
                request, deadlines.total_s - now - optimistic.ttft_s
            )
            if chance is not None:
                # The output length that has the minimum chance is late already by the forecast.
                chance = min(chance, self._completion.min_chance)
        wait_s = retry_after_s(
            likely, now, ttft_deadline_s=deadlines.ttft_s, deadline_s=deadlines.total_s
        )
        return Rejection(
            reason=FailureReason.TTFT_DEADLINE_UNREACHABLE
            if is_ttft
            else FailureReason.DEADLINE_UNREACHABLE,
            estimate_s=now + needed_s - arrival_s,
            deadline_s=(deadlines.ttft_s if is_ttft else deadlines.total_s) - arrival_s,
            chance=chance,
            # A retry with the same time to its deadlines would be late even on an idle machine.
            retry_after_s=wait_s if deadlines.are_met(alone, arrival_s) else math.inf,
        )

    def _machine(self) -> Machine:
        fit = self._sizing.fit
        return Machine(
            prices=fit,
            max_prefill_tokens=self._max_tokens,
            prefill_error=fit.prefill_error,
            decode_error=fit.decode_error,
        )

    def _demand(self, request: Request, matched: list[int]) -> Demand:
        spec = request.spec
        num_tokens = len(request.tokens)
        num_cached = 0
        if spec.sampling.num_prompt_logprobs < 0:
            num_cached = len(matched) * self._cache.block_size
        num_known = num_tokens - spec.num_original_prompt_tokens
        num_least = max(spec.min_tokens - num_known, 1)
        if spec.deadline_s != NO_TIME:
            num_least = max(num_least, self._completion.least_tokens(request))
        kept = self._info.num_kept_tokens(spec.max_total_tokens)
        return Demand(
            num_prefill_tokens=num_tokens - num_cached,
            num_cached_tokens=num_cached,
            num_blocks=self._cache.num_taken(
                matched if num_cached else [], kept if self._is_guaranteed else num_tokens
            ),
            min_output_tokens=num_least,
            expected_output_tokens=self._expected_tokens(request),
        )

    def _expected_tokens(self, request: Request) -> float:
        """Return how many tokens it is still expected to generate, at least the certain ones."""
        spec, num_tokens = request.spec, len(request.tokens)
        num_certain = spec.num_original_prompt_tokens + spec.min_tokens - num_tokens
        expected = self._completion.lengths.expected(spec.max_total_tokens - num_tokens)
        return max(expected, num_certain, 1.0)
