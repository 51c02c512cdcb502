"""Predicts whether a request meets its deadlines, and how long it will wait.

Owns the decision: it examines running and waiting requests, uses `forecast.py`, and determines
which requests are refused or dropped and what is reported to them. Does not end any request itself,
and has no clock.

- **At submission** a request is refused when it would be late after its expected queue time
  (`forecast`, less the error of the cost model) and then its prefill alone on the machine.
- **In the queue** it is dropped from the moment on at which it would be late with the whole machine
  to itself (`forecast_alone`).
- **At admission** it is dropped when it would be late next to the running requests: the last moment
  before compute is spent on it.
- **Whole answers** are predicted by probability as well (`completion.py`): at submission, at
  admission and, a few times a second, while they run.

A prefix that is in the cache, or that a live request may be computing, counts as found. Nothing is
predicted for a self-paced executor, or for a `time_limit`, which is no failure to reach. Steps of a
kind whose cost is not known well (with prefill, without) refuse no request, nor does a cost model
that no step has confirmed for a second on an idle machine: that request is admitted as a trial.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.scheduler.completion import CompletionPredictor
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.contention import Contention
from penstock.scheduler.deadlines import Deadlines, deadlines_of
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.forecast import (
    Ahead,
    Forecast,
    Load,
    Machine,
    Want,
    forecast,
    forecast_alone,
    hopeless_at_s,
    retry_after_s,
)
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.live_prefixes import LivePrefixes
from penstock.scheduler.pace import Pace
from penstock.scheduler.quotas import QuotaBreach
from penstock.scheduler.request import NO_TIME, FailureReason, Request
from penstock.scheduler.running import Running
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.urgency import urgent_of
from penstock.scheduler.waiting_queue import WaitingQueue

_TRIAL_AFTER_S = 1.0
_FAR = 20.0
"""So many times the steps that a request needs, at the duration of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a request is refused or dropped, and the reported figures: see `events.Failed`."""

    reason: FailureReason
    estimate_s: float | None = None
    deadline_s: float | None = None
    chance: float | None = None
    retry_after_s: float | None = None
    breach: QuotaBreach | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The prediction for an arriving request: see `events.Queued`; `verdict`: why to reject it,
    None to admit it. `displaced`: waiting requests that it then displaces.
    """

    num_ahead: int
    queue_s: float | None = None
    verdict: Verdict | None = None
    displaced: tuple[Request, ...] = ()


class Outlook:
    """Predicts for the requests of one engine."""

    def __init__(
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        *,
        arrays: SlotArrays,
        cache: KVCache,
        running: Running,
        queue: WaitingQueue,
        tenants: Tenants,
    ) -> None:
        self.pace = Pace(info, config)
        self.completion = CompletionPredictor(
            config.min_deadline_chance, self.pace.fit, arrays=arrays, running=running
        )
        self._contention = Contention(
            config,
            self.pace,
            self.completion.lengths,
            arrays=arrays,
            cache=cache,
            running=running,
            queue=queue,
            tenants=tenants,
        )
        self.prefixes = LivePrefixes()
        self._arrays = arrays
        self._cache = cache
        self._running = running
        self._queue = queue
        self._is_foreseeing = config.foresees_deadlines
        self._is_guaranteed = config.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
        self._info = info
        self._max_tokens = config.max_num_batched_tokens

    def prepare(self, request: Request) -> None:
        """Record the demand of a request that is about to wait, and when to check it again."""
        spec, num_tokens = request.spec, len(request.tokens)
        request.num_kept_tokens = num_tokens
        if self._is_guaranteed:
            request.num_kept_tokens = self._info.num_kept_tokens(spec.max_total_tokens)
        request.num_expected_tokens = round(self._expected_tokens(request))
        request.num_uncached_tokens = num_tokens
        request.recheck_s = min(spec.time_limit_s, deadlines_of(request).earliest_s)
        if not self.pace.has_prices:
            return
        matched = self._cache.match(request)
        request.num_uncached_tokens = self._want(request, matched).num_prefill_tokens
        if self._is_foreseeing:
            if not request.num_preemptions:
                self.prefixes.add(request, len(matched))
            request.recheck_s = min(spec.time_limit_s, self._hopeless_s(request, matched))

    def prospect(self, request: Request, now: float) -> Prospect:
        """The prediction for a request that is about to join the queue, and whether it
        should not.
        """
        if not self.pace.has_prices:
            return Prospect(num_ahead=self._queue.ahead_of(request, 0).num_requests)
        deadlines = deadlines_of(request)
        if deadlines.total_s != NO_TIME:
            has_line = self._queue.sums.has_line(request)
            self.completion.note_arrival(request, now, finds_queue=has_line)
        if not (deadlines.is_any or len(self._queue)) and self._has_place:
            return Prospect(num_ahead=0, queue_s=0.0)
        machine = self._machine()
        matched = self._cache.match(request)
        want = self._want(request, matched)
        load, ahead = self._contention.of_arrival(request, want)
        likely = forecast(machine, want, load, ahead)
        verdict = None
        if deadlines.is_any and self._is_able and not self._is_trial(request, now):
            alone = forecast_alone(machine, want)
            hope = replace(alone, queue_s=likely.queue_left * likely.queue_s)
            verdict = self._rejection(request, want, load, likely, hope, now)
            if verdict is not None and (
                self.prefixes.is_wanted(request, len(matched))
                or self._is_exploring(request, verdict)
            ):
                verdict = None
        return Prospect(num_ahead=ahead.num_requests, queue_s=likely.queue_s, verdict=verdict)

    def hopeless_s(self, request: Request) -> float:
        """When a waiting request can no longer meet its deadlines, as predicted now.

        NO_TIME for never. A prefix that another request may compute counts as found.
        """
        matched = self._cache.match(request)
        if self.prefixes.is_wanted(request, len(matched)):
            return deadlines_of(request).earliest_s
        return self._hopeless_s(request, matched)

    def dropped(self, request: Request, now: float) -> Verdict:
        """The verdict for a request at its `hopeless_s`."""
        deadlines = deadlines_of(request)
        if not self.pace.has_prices:
            return Verdict(reason=deadlines.passed_by(now))
        want = self._want(request, self._cache.match(request))
        load, ahead = self._contention.of_arrival(request, want)
        likely = forecast(self._machine(), want, load, ahead)
        verdict = self._late(request, want, likely, likely, now)
        is_over = deadlines.earliest_s <= now
        return replace(verdict, reason=deadlines.passed_by(now)) if is_over else verdict

    def crowded(self, request: Request, reason: FailureReason, now: float) -> Verdict:
        """The verdict for a request that does not fit into the queue."""
        if not self.pace.has_prices:
            return Verdict(reason=reason)
        want = self._want(request, self._cache.match(request))
        load, ahead = self._contention.of_arrival(request, want)
        likely = forecast(self._machine(), want, load, ahead)
        # As much as its own demand must have left the queue by then.
        leaving = Ahead(
            num_requests=1,
            num_prefill_tokens=want.num_prefill_tokens,
            num_blocks=want.num_blocks,
            num_output_tokens=want.expected_output_tokens,
        )
        until = forecast(self._machine(), want, load, leaving)
        return Verdict(
            reason=reason, estimate_s=likely.ttft_s, retry_after_s=retry_after_s(until, now)
        )

    def verdict_at_admission(
        self, request: Request, matched: list[int], now: float
    ) -> Verdict | None:
        """Why a request that could run now is not worth it; None when it is.

        With the running requests and the present budget of prefill it takes the time of
        `forecast` once it is admitted, less the error of the prices.
        """
        deadlines = deadlines_of(request)
        if not (deadlines.is_any and self._is_able) or request.is_trial:
            return None
        if self._is_far(request, deadlines, now):
            return None
        machine, want = self._machine(), self._want(request, matched)
        load = self._contention.of_admission(request, want)
        likely = forecast(machine, want, load, Ahead())
        alone = forecast_alone(machine, want)
        hope = Forecast(
            queue_s=likely.queue_left * likely.queue_s,
            prefill_s=likely.prefill_left * likely.prefill_s,
            decode_s=alone.decode_s,
        )
        return self._rejection(request, want, load, likely, hope, now)

    def note_step(self, seconds: float, now: float, *, has_prefill: bool) -> bool:
        """A step was timed; whether it is worth learning from."""
        self.completion.token_time.note_step(seconds, now)
        return self.pace.note_step(seconds, now, has_prefill=has_prefill)

    def given_up(self, now: float) -> list[tuple[Request, Verdict]]:
        """Running requests that have less than the smallest chance to end before their deadlines.

        Only once in a while; empty in between.
        """
        if not (self._is_able and self.completion.is_check_due(now)):
            return []
        load = self._contention.load()
        token_s = self.completion.token_time.beside(load, now)
        found: list[tuple[Request, Verdict]] = []
        for request, chance in self.completion.running_late(token_s, now):
            want = self._want(request, [])
            likely = forecast(self._machine(), want, load, Ahead())
            done_s = now + want.min_output_tokens * token_s
            found.append((request, self._unlikely(request, want, likely, chance, done_s)))
        return found

    def urgent(self, under_way: Iterable[Request], now: float) -> dict[int, float]:
        """Slots of prompts under way that must not share (urgency.py), and when they are due."""
        due = {request.slot: deadlines_of(request).ttft_s for request in under_way}
        due = {slot: due_s for slot, due_s in due.items() if due_s != NO_TIME}
        if not (due and self._is_able):
            return {}
        load, arrays = self._contention.load(), self._arrays
        return urgent_of(due, machine=self._machine(), load=load, arrays=arrays, now=now)

    def _is_far(self, request: Request, deadlines: Deadlines, now: float) -> bool:
        """Whether a deadline is so far away that no prediction is needed: only to save cost."""
        num_tokens, spec = len(request.tokens), request.spec
        is_judged = deadlines.total_s != NO_TIME and self.completion.min_chance > 0.0
        num_output = spec.max_tokens if is_judged else spec.min_tokens
        num_steps = 2 * num_tokens // self.pace.prefill_budget_tokens + num_output + 2
        left_s = deadlines.earliest_s - now
        return left_s > _FAR * num_steps * self.pace.last_step_s

    @property
    def _has_place(self) -> bool:
        return len(self._running) < self.pace.max_num_running

    @property
    def _is_able(self) -> bool:
        return self._is_foreseeing and self.pace.has_prices

    def _is_trial(self, request: Request, now: float) -> bool:
        """Whether this request is admitted to measure whether the machine's speed has changed.

        If old measurements refused all requests, none would ever run to correct them.
        """
        is_idle = not (len(self._running) or len(self._queue))
        is_due = is_idle and now - self.pace.last_step_at_s >= _TRIAL_AFTER_S
        request.is_trial = request.is_trial or is_due
        return request.is_trial

    def _is_exploring(self, request: Request, verdict: Verdict) -> bool:
        """Whether this request is admitted to measure whether output lengths have changed."""
        chance, judge = verdict.chance, self.completion
        is_learned = chance is not None and 0.0 < chance < judge.min_chance
        request.is_trial = is_learned and judge.exploration.takes_unlikely(request.spec.tenant)
        return request.is_trial

    def _hopeless_s(self, request: Request, matched: list[int]) -> float:
        deadlines = deadlines_of(request)
        if not (deadlines.is_any and self._is_able) or request.is_trial:
            return deadlines.earliest_s
        return hopeless_at_s(
            self._machine(),
            self._want(request, matched),
            ttft_deadline_s=deadlines.ttft_s,
            deadline_s=deadlines.total_s,
        )

    def _rejection(
        self, request: Request, want: Want, load: Load, likely: Forecast, hope: Forecast, now: float
    ) -> Verdict | None:
        """Why not to admit a request with `hope` at best; None to admit it."""
        if not deadlines_of(request).are_met(hope, now):
            return self._late(request, want, likely, hope, now)
        if request.spec.deadline_s == NO_TIME:
            return None
        completion = self.completion.assess(
            request,
            queue_s=hope.queue_s,
            prefill_s=likely.prefill_left * likely.prefill_s,
            token_s=self.completion.token_time.beside(load, now),
            now=now,
        )
        if completion is None or completion.chance >= completion.required:
            return None
        return self._unlikely(request, want, likely, completion.chance, now + completion.needed_s)

    def _unlikely(
        self, request: Request, want: Want, likely: Forecast, chance: float, done_s: float
    ) -> Verdict:
        """The verdict for a request that will probably be late; `done_s`: its predicted end."""
        spec = request.spec
        alone = forecast_alone(self._machine(), want)
        is_possible = spec.arrival_s + alone.total_s < spec.deadline_s
        return Verdict(
            reason=FailureReason.DEADLINE_UNREACHABLE,
            estimate_s=max(done_s, spec.deadline_s) - spec.arrival_s,
            deadline_s=spec.deadline_s - spec.arrival_s,
            chance=chance,
            retry_after_s=retry_after_s(likely, done_s) if is_possible else math.inf,
        )

    def _late(
        self, request: Request, want: Want, likely: Forecast, hope: Forecast, now: float
    ) -> Verdict:
        """The verdict for a request that is late even with `hope`; the reported figures are the
        likely ones.
        """
        deadlines, arrival_s = deadlines_of(request), request.spec.arrival_s
        is_ttft = now + hope.ttft_s >= deadlines.ttft_s
        needed_s = max(likely.ttft_s, hope.ttft_s) if is_ttft else max(likely.total_s, hope.total_s)
        alone = forecast_alone(self._machine(), want)
        chance: float | None = None
        if not is_ttft:
            chance = self.completion.chance_in(request, deadlines.total_s - now - hope.ttft_s)
            if chance is not None:
                # As many tokens as have the smallest chance are late already by the forecast.
                chance = min(chance, self.completion.min_chance)
        wait_s = retry_after_s(
            likely, now, ttft_deadline_s=deadlines.ttft_s, deadline_s=deadlines.total_s
        )
        return Verdict(
            reason=FailureReason.TTFT_DEADLINE_UNREACHABLE
            if is_ttft
            else FailureReason.DEADLINE_UNREACHABLE,
            estimate_s=now + needed_s - arrival_s,
            deadline_s=(deadlines.ttft_s if is_ttft else deadlines.total_s) - arrival_s,
            chance=chance,
            # With as much time again an idle machine would not meet it either.
            retry_after_s=wait_s if deadlines.are_met(alone, arrival_s) else math.inf,
        )

    def _machine(self) -> Machine:
        fit = self.pace.fit
        return Machine(
            prices=fit,
            max_prefill_tokens=self._max_tokens,
            prefill_error=fit.prefill_error,
            decode_error=fit.decode_error,
        )

    def _want(self, request: Request, matched: list[int]) -> Want:
        spec = request.spec
        num_tokens = len(request.tokens)
        num_cached = 0
        if spec.sampling.num_prompt_logprobs < 0:
            num_cached = len(matched) * self._cache.block_size
        num_known = num_tokens - spec.num_original_prompt_tokens
        num_least = max(spec.min_tokens - num_known, 1)
        if spec.deadline_s != NO_TIME:
            num_least = max(num_least, self.completion.least_tokens(request))
        kept = self._info.num_kept_tokens(spec.max_total_tokens)
        return Want(
            num_prefill_tokens=num_tokens - num_cached,
            num_cached_tokens=num_cached,
            num_blocks=self._cache.num_taken(
                matched if num_cached else [], kept if self._is_guaranteed else num_tokens
            ),
            min_output_tokens=num_least,
            expected_output_tokens=self._expected_tokens(request),
        )

    def _expected_tokens(self, request: Request) -> float:
        """Tokens it is expected to generate still, at least the certain ones."""
        spec, num_tokens = request.spec, len(request.tokens)
        num_certain = spec.num_original_prompt_tokens + spec.min_tokens - num_tokens
        expected = self.completion.lengths.expected(spec.max_total_tokens - num_tokens)
        return max(expected, num_certain, 1.0)
