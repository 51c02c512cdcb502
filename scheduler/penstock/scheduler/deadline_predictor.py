"""Predicts whether a request meets its deadlines, and how long it will wait.

Decides, from the running and waiting requests and `forecast.py`, which requests are rejected or
dropped, and which values their clients receive. Does not end requests, and reads no clock.

- **At submission** a request is rejected if it would be late after its expected queue time
  (`forecast`, less the error of the cost model) followed by prefill and decode on an otherwise idle
  machine.
- **In the queue** it is dropped once it would be late even on an otherwise idle machine
  (`forecast_alone`).
- **At admission** it is dropped if it would be late next to the running requests, before compute is
  spent on it.
- **Complete outputs** are predicted by probability as well (`completion.py`): at submission, at
  admission and, a few times per second, while they run.

A prefix that is cached, or that a live request may be computing, counts as a cache hit. There are
no predictions for a self-paced executor (see `ExecutorInfo`), nor for a `time_limit`, since
reaching it is not a failure. No request is rejected while the cost of the steps it needs (with
prefill or without) is uncertain. If the machine is idle and the last step ended at least a second
ago, the request is admitted to measure the machine again.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.scheduler.admission_blocks import AdmissionBlocks
from penstock.scheduler.completion import CompletionPredictor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.contention import Contention
from penstock.scheduler.forecast import (
    Deadlines,
    Demand,
    Forecast,
    MachineModel,
    QueuedAhead,
    RunningLoad,
    deadlines_of,
    forecast,
    forecast_alone,
    latest_admission_s,
    retry_after_s,
)
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.live_prefixes import LivePrefixes
from penstock.scheduler.quotas import QuotaBreach
from penstock.scheduler.request import NO_TIME, FailureReason, Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.waiting_queue import WaitingQueue
from penstock.scheduler.waiting_sums import WaitingSums

_TRIAL_AFTER_S = 1.0
_SPARE_STEPS = 2
"""A prompt is urgent if it would be late after this many more full steps for other prompts."""
_FAR = 20.0
"""A deadline is far if it leaves time for this many times the steps that the request needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a request is rejected or dropped, and the values to report; see `events.Failed`."""

    reason: FailureReason
    estimate_s: float | None = None
    deadline_s: float | None = None
    chance: float | None = None
    retry_after_s: float | None = None
    breach: QuotaBreach | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEstimate:
    """The prediction for an arriving request; see `events.Queued`.

    `rejection`: None if it is admitted. `displaced`: waiting requests that it displaces if
    admitted.
    """

    num_ahead: int
    queue_s: float | None = None
    rejection: Rejection | None = None
    displaced: tuple[Request, ...] = ()


class DeadlinePredictor:
    """Predicts whether the requests of one engine meet their deadlines."""

    def __init__(  # noqa: PLR0913 - each is one thing that a prediction depends on
        self,
        config: SchedulerConfig,
        *,
        sizing: StepSizing,
        completion: CompletionPredictor,
        arrays: SlotArrays,
        cache: KVCache,
        blocks: AdmissionBlocks,
        running: RunningSet,
        queue: WaitingQueue,
        sums: WaitingSums,
        tenants: TenantCounters,
    ) -> None:
        self._sizing = sizing
        self._completion = completion
        self._contention = Contention(
            config,
            sizing,
            completion.lengths,
            arrays=arrays,
            cache=cache,
            blocks=blocks,
            running=running,
            queue=queue,
            tenants=tenants,
        )
        self._prefixes = LivePrefixes()
        self._arrays = arrays
        self._cache = cache
        self._blocks = blocks
        self._running = running
        self._queue = queue
        self._sums = sums
        self._is_predicting = config.deadline_admission
        self._max_tokens = config.max_num_batched_tokens

    def prepare(self, request: Request) -> None:
        """Set the predicted demand and the `recheck_s` of a request that is about to wait, and add
        its prompt to the index of live prefixes.
        """
        spec, num_tokens = request.spec, len(request.tokens)
        request.num_blocks = self._blocks.num_held(request)
        request.num_expected_tokens = round(self._expected_tokens(request))
        request.num_uncached_tokens = num_tokens
        request.recheck_s = min(spec.time_limit_s, deadlines_of(request).earliest_s)
        if not self._sizing.has_cost:
            return
        matched = self._cache.match(request)
        demand = self._demand(request, matched)
        request.num_uncached_tokens = demand.num_prefill_tokens
        request.num_blocks = demand.num_blocks
        if self._is_predicting:
            if not request.num_preemptions:
                self._prefixes.add(request, len(matched))
            request.recheck_s = min(spec.time_limit_s, self._latest_admission_s(request, matched))

    def forget(self, request: Request) -> None:
        """Remove a request that has ended from the index of live prefixes; a no-op if it is not in
        it.
        """
        self._prefixes.remove(request)

    def faults(self, live: Mapping[int, Request]) -> list[str]:
        """Return the inconsistencies of the index of live prefixes, given the live requests."""
        return self._prefixes.faults(live)

    def estimate(self, request: Request, now: float) -> QueueEstimate:
        """Return the prediction for a request that is about to join the queue, and whether to
        reject it.

        Records the arrival of a request with a deadline, and sets `is_trial` or `is_new` of a
        request that is admitted to learn from it.
        """
        if not self._sizing.has_cost:
            return QueueEstimate(num_ahead=self._queue.ahead_of(request, 0).num_requests)
        deadlines = deadlines_of(request)
        if deadlines.total_s != NO_TIME:
            has_queue = self._sums.has_queue(request)
            self._completion.note_arrival(request, now, finds_queue=has_queue)
        is_checked = deadlines.is_any and self._can_predict
        if not (is_checked or len(self._queue)) and self._fits_now(request):
            return QueueEstimate(num_ahead=0, queue_s=0.0)
        machine = self._machine_model()
        matched = self._cache.match(request)
        demand = self._demand(request, matched)
        load, ahead = self._contention.load_at_arrival(request, demand)
        likely = forecast(machine, demand, load, ahead)
        rejection = None
        if is_checked and not self._is_trial(request, now):
            alone = forecast_alone(machine, demand)
            optimistic = replace(alone, queue_s=likely.queue_left * likely.queue_s)
            rejection = self._rejection(request, demand, load, likely, optimistic, now)
            if rejection is not None and (
                self._prefixes.may_be_computed(request, len(matched))
                or self._is_exploring(request, rejection)
            ):
                rejection = None
        return QueueEstimate(
            num_ahead=ahead.num_requests, queue_s=likely.queue_s, rejection=rejection
        )

    def latest_admission_s(self, request: Request) -> float:
        """Return the predicted time, on the engine clock, after which a waiting request misses its
        deadlines.

        NO_TIME without deadlines. The earliest deadline itself if predictions are disabled or not
        possible yet, if the request is exempt from them (`is_trial`), or if another request may
        compute part of its prefix.
        """
        matched = self._cache.match(request)
        if self._prefixes.may_be_computed(request, len(matched)):
            return deadlines_of(request).earliest_s
        return self._latest_admission_s(request, matched)

    def expired_rejection(self, request: Request, now: float) -> Rejection:
        """Return the rejection of a request whose deadline or `latest_admission_s` has passed."""
        deadlines = deadlines_of(request)
        if not self._sizing.has_cost:
            return Rejection(reason=deadlines.exceeded_reason(now))
        demand = self._demand(request, self._cache.match(request))
        load, ahead = self._contention.load_at_arrival(request, demand)
        likely = forecast(self._machine_model(), demand, load, ahead)
        rejection = self._late_rejection(request, demand, likely, likely, now)
        is_over = deadlines.earliest_s <= now
        return replace(rejection, reason=deadlines.exceeded_reason(now)) if is_over else rejection

    def limit_rejection(self, request: Request, reason: FailureReason, now: float) -> Rejection:
        """Return the rejection of a request that exceeds a limit of the queue or of its tenant.

        `reason`: the limit. If the cost of steps is known, the rejection contains a retry time and
        the predicted time to the first token from now, had the request joined the queue.
        """
        if not self._sizing.has_cost:
            return Rejection(reason=reason)
        demand = self._demand(request, self._cache.match(request))
        load, ahead = self._contention.load_at_arrival(request, demand)
        likely = forecast(self._machine_model(), demand, load, ahead)
        # The wait until requests with as much demand as this one have left the queue.
        leaving = QueuedAhead(
            num_requests=1,
            num_prefill_tokens=demand.num_prefill_tokens,
            num_blocks=demand.num_blocks,
            num_output_tokens=demand.expected_output_tokens,
        )
        until = forecast(self._machine_model(), demand, load, leaving)
        return Rejection(
            reason=reason, estimate_s=likely.ttft_s, retry_after_s=retry_after_s(until, now)
        )

    def check_at_admission(
        self, request: Request, matched: list[int], now: float
    ) -> Rejection | None:
        """Return the rejection of a request that fits now but would be late; None to admit it.

        Queue and prefill are predicted by `forecast`, with the running requests and the current
        prefill budget, less the error of the cost model; decode as on an idle machine.
        """
        deadlines = deadlines_of(request)
        if not (deadlines.is_any and self._can_predict) or request.is_trial:
            return None
        if self._is_deadline_far(request, deadlines, now):
            return None
        machine, demand = self._machine_model(), self._demand(request, matched)
        load = self._contention.load_at_admission(request, demand)
        likely = forecast(machine, demand, load, QueuedAhead())
        alone = forecast_alone(machine, demand)
        optimistic = Forecast(
            queue_s=likely.queue_left * likely.queue_s,
            prefill_s=likely.prefill_left * likely.prefill_s,
            decode_s=alone.decode_s,
        )
        return self._rejection(request, demand, load, likely, optimistic, now)

    def running_late(self, now: float) -> list[tuple[Request, Rejection]]:
        """Return the running requests that will probably miss their deadlines (see
        `CompletionPredictor.running_late`), each with its rejection.

        The check runs at intervals; in between the list is empty.
        """
        if not (self._can_predict and self._completion.is_check_due(now)):
            return []
        load = self._contention.load()
        token_s = self._completion.token_time.under_load(load, now)
        found: list[tuple[Request, Rejection]] = []
        for request, chance in self._completion.running_late(token_s, now):
            demand = self._demand(request, [])
            likely = forecast(self._machine_model(), demand, load, QueuedAhead())
            done_s = now + demand.min_output_tokens * token_s
            found.append(
                (request, self._unlikely_rejection(request, demand, likely, chance, done_s))
            )
        return found

    def urgent(self, in_prefill: Iterable[Request], now: float) -> dict[int, float]:
        """Return, by slot, the TTFT deadlines (engine clock, seconds) of prompts in progress that
        need the whole prefill budget from now on to be in time.

        If several long prompts share every step, all of them may be late; computed one after the
        other, some are in time.
        """
        due = {request.slot: deadlines_of(request).ttft_s for request in in_prefill}
        due = {slot: due_s for slot, due_s in due.items() if due_s != NO_TIME}
        if not (due and self._can_predict):
            return {}
        load, arrays, machine = self._contention.load(), self._arrays, self._machine_model()
        num_spare = _SPARE_STEPS * load.prefill_budget_tokens
        urgent: dict[int, float] = {}
        for slot, due_s in due.items():
            num_done = int(arrays.num_computed[slot])
            num_left = int(arrays.num_tokens[slot]) - num_done
            demand = Demand(num_prefill_tokens=num_left + num_spare, num_cached_tokens=num_done)
            if now + forecast(machine, demand, load, QueuedAhead()).prefill_s > due_s:
                urgent[slot] = due_s
        return urgent

    def _is_deadline_far(self, request: Request, deadlines: Deadlines, now: float) -> bool:
        """Return whether the deadline is so far away that no prediction is needed."""
        num_tokens, spec = len(request.tokens), request.spec
        is_checked = deadlines.total_s != NO_TIME and self._completion.min_chance > 0.0
        num_output = spec.max_tokens if is_checked else spec.min_tokens
        num_steps = 2 * num_tokens // self._sizing.prefill_budget_tokens + num_output + 2
        left_s = deadlines.earliest_s - now
        return left_s > _FAR * num_steps * self._sizing.last_step_s

    def _fits_now(self, request: Request) -> bool:
        """Return whether a request can be admitted now, even if none of its blocks is cached."""
        is_below_limit = len(self._running) < self._sizing.max_num_running
        return is_below_limit and self._blocks.num_held(request) <= self._blocks.num_left

    @property
    def _can_predict(self) -> bool:
        return self._is_predicting and self._sizing.has_cost

    def _is_trial(self, request: Request, now: float) -> bool:
        """Return whether this request is exempt from rejection, for example to measure the
        machine's current speed; set its `is_trial` to the result.

        Otherwise outdated measurements could cause every request to be rejected, and no step would
        correct them.
        """
        is_idle = not (len(self._running) or len(self._queue))
        is_due = is_idle and now - self._sizing.last_step_at_s >= _TRIAL_AFTER_S
        request.is_trial = request.is_trial or is_due
        return request.is_trial

    def _is_exploring(self, request: Request, rejection: Rejection) -> bool:
        """Return whether this request is admitted to measure the current output lengths; set its
        `is_trial` to the result.
        """
        has_chance = rejection.chance is not None and rejection.chance > 0.0
        exploration = self._completion.exploration
        request.is_trial = has_chance and exploration.explores_unlikely(request.spec.tenant)
        return request.is_trial

    def _latest_admission_s(self, request: Request, matched: list[int]) -> float:
        deadlines = deadlines_of(request)
        if not (deadlines.is_any and self._can_predict) or request.is_trial:
            return deadlines.earliest_s
        return latest_admission_s(
            self._machine_model(),
            self._demand(request, matched),
            ttft_deadline_s=deadlines.ttft_s,
            deadline_s=deadlines.total_s,
        )

    def _rejection(
        self,
        request: Request,
        demand: Demand,
        load: RunningLoad,
        likely: Forecast,
        optimistic: Forecast,
        now: float,
    ) -> Rejection | None:
        """Return the rejection of a request, None to admit it. `optimistic`: lower bounds of its
        times.
        """
        if not deadlines_of(request).are_met(optimistic, now):
            return self._late_rejection(request, demand, likely, optimistic, now)
        if request.spec.deadline_s == NO_TIME:
            return None
        completion = self._completion.assess(
            request,
            queue_s=optimistic.queue_s,
            prefill_s=likely.prefill_left * likely.prefill_s,
            token_s=self._completion.token_time.under_load(load, now),
            now=now,
        )
        if completion is None or completion.chance >= completion.required:
            return None
        done_s = now + completion.needed_s
        rejection = self._unlikely_rejection(request, demand, likely, completion.chance, done_s)
        wait_s = max(rejection.retry_after_s or 0.0, completion.slowdown_s)
        return replace(rejection, retry_after_s=wait_s)

    def _unlikely_rejection(
        self, request: Request, demand: Demand, likely: Forecast, chance: float, done_s: float
    ) -> Rejection:
        """Return the rejection of a request that will probably be late; `done_s`: its predicted
        end.
        """
        spec = request.spec
        alone = forecast_alone(self._machine_model(), demand)
        is_possible = spec.arrival_s + alone.total_s < spec.deadline_s
        return Rejection(
            reason=FailureReason.DEADLINE_UNREACHABLE,
            estimate_s=max(done_s, spec.deadline_s) - spec.arrival_s,
            deadline_s=spec.deadline_s - spec.arrival_s,
            chance=chance,
            retry_after_s=retry_after_s(likely, done_s) if is_possible else math.inf,
        )

    def _late_rejection(
        self, request: Request, demand: Demand, likely: Forecast, optimistic: Forecast, now: float
    ) -> Rejection:
        """Return the rejection of a request that is late even in the `optimistic` forecast. The
        reported time is the greater of both forecasts; the retry time comes from `likely`.
        """
        deadlines, arrival_s = deadlines_of(request), request.spec.arrival_s
        is_ttft = now + optimistic.ttft_s >= deadlines.ttft_s
        needed_s = (
            max(likely.ttft_s, optimistic.ttft_s)
            if is_ttft
            else max(likely.total_s, optimistic.total_s)
        )
        alone = forecast_alone(self._machine_model(), demand)
        chance: float | None = None
        if not is_ttft:
            chance = self._completion.chance_in(
                request, deadlines.total_s - now - optimistic.ttft_s
            )
            if chance is not None:
                # The forecast is already late for the output length at the minimum chance.
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

    def _machine_model(self) -> MachineModel:
        fit = self._sizing.fit
        return MachineModel(
            cost=fit,
            max_prefill_tokens=self._max_tokens,
            prefill_error=fit.prefill_error,
            decode_error=fit.decode_error,
        )

    def _demand(self, request: Request, matched: list[int]) -> Demand:
        spec = request.spec
        num_tokens = len(request.tokens)
        num_cached = len(matched) * self._cache.block_size
        num_known = num_tokens - spec.num_original_prompt_tokens
        num_least = max(spec.min_tokens - num_known, 1)
        if spec.deadline_s != NO_TIME:
            num_least = max(num_least, self._completion.min_further_tokens(request))
        return Demand(
            num_prefill_tokens=num_tokens - num_cached,
            num_cached_tokens=num_cached,
            num_blocks=self._blocks.num_taken(request, matched),
            min_output_tokens=num_least,
            expected_output_tokens=self._expected_tokens(request),
        )

    def _expected_tokens(self, request: Request) -> float:
        """Return how many more tokens the request is expected to generate; at least 1, and enough
        to reach `min_tokens`.
        """
        spec, num_tokens = request.spec, len(request.tokens)
        num_certain = spec.num_original_prompt_tokens + spec.min_tokens - num_tokens
        expected = self._completion.lengths.expected(spec.max_total_tokens - num_tokens)
        return max(expected, num_certain, 1.0)
