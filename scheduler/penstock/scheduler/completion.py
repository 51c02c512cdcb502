"""Computes the probability that a request completes before its deadline.

Combines the output lengths (output_lengths.py) with the time per token of running requests and with
how long queues have persisted. Does not read the queue.

- **Chance.** Let `left` be the time that remains after queue and prefill, and t the recent
  inter-token latency. Then n = 1 + left / t tokens can be generated in time. The chance is the
  probability that the output has at most n tokens.
- **Minimum chance.** A request whose chance is below `min_deadline_chance` is rejected on arrival,
  dropped from the queue, or ended while it runs.
- **Slowdown.** Times are predicted for the present load. Requests admitted later make them longer,
  so they are multiplied by the ratio of actual to predicted time of recent requests.
- **Under load.** On arrival, the chance under the current load must be at least 94 % of the chance
  on an idle machine, on average over the recently admitted prompt tokens. A request with a lower
  chance is admitted if the average allows it. This limits how many requests run together, so that
  most complete in time. It also rejects long outputs while the machine is too slow for them,
  instead of wasting compute.
- **Standing queue.** A standing queue helps no request: arrivals equal departures, and every
  request has lost its queue time. So all requests end close to their deadlines, and many of them
  too late, with all of their compute wasted (the domino effect of deadline order under overload:
  Buttazzo, *Hard Real-Time Computing Systems*, chapter 9). So the longer a tenant's queue in a
  class has persisted, the closer a request's chance must be to the chance that it would have after
  a short wait (after Nichols and Jacobson, "Controlling Queue Delay", 2012). This wait is a
  fortieth of its time to the deadline, or its prefill time if that is longer. A burst on a machine
  that is not overloaded may wait as long as the average above allows.

A request with a short `max_tokens` keeps a chance of 1 while it waits, and these rules do not
affect it. If only the limit can end an output, its length is known and no samples are needed.

output_lengths.py selects requests that are admitted in spite of a low chance, to learn output
lengths.
"""

import math
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.forecast import RunningLoad
from penstock.scheduler.output_lengths import (
    UNENDING,
    Exploration,
    LengthDistribution,
    OutputBounds,
    OutputLengths,
    RunningOutputs,
)
from penstock.scheduler.request import NO_TIME, PredictedTime, Request, RequestSpec
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_fit import StepFit

_MEMORY_S = 10.0
"""Decay time of the past in `StandingQueues` and `TokenTime`, seconds."""
_STANDING_WAIT_SHARE = 0.025
"""Maximum wait in a standing queue, as a fraction of the request's time to its deadline."""
_FULL_CONTENTION = 0.5
"""A queue that is non-empty for this fraction of the time counts as one that is never empty."""
_ADMISSION_SHARE = 0.8
"""Factor of the chance required of a request that has waited, when it is admitted, so that it is
not dropped for a small shortfall.
"""
_MIN_SHARE_UNDER_LOAD = 0.94
"""Minimum chance under load, as a fraction of the chance on an idle machine, on average."""
_CREDIT_MEMORY_S = 60.0
_SLOWDOWN_MEMORY_S = 30.0
_MAX_SLOWDOWN = 2.0
"""Upper bound of the slowdown, because one stall does not predict another."""
_SLOWDOWN_PRIOR = 3_000.0
"""Constant, in token seconds, added to the sum of predicted times, so that a few requests change
the slowdown little.
"""
_MAX_QUEUES = 4096
_CHECK_EVERY_S = 0.25
"""Interval of the checks of running requests, seconds."""


class TokenTime:
    """Recent mean inter-token latency of running requests.

    It is the duration of the steps divided by their number, both with exponential decay. A step
    that pauses decodes, to prefill for a tenant below its fair share, adds time but no step, so
    that predictions include such pauses. Idle time counts as steps of one request alone, so that a
    long prefill on an otherwise idle server does not dominate the mean.
    """

    __slots__ = ("_at_s", "_fit", "_num_tokens", "_seconds")

    def __init__(self, fit: StepFit) -> None:
        self._fit = fit
        self._at_s = -math.inf
        self._seconds = 0.0
        self._num_tokens = 0.0

    @property
    def alone_s(self) -> float:
        """Inter-token latency of a request that runs alone, seconds."""
        return self._fit.step_time_s(num_prefill_tokens=0, num_decodes=1, num_context_tokens=0)

    def note_step(self, seconds: float, now: float, *, has_paused: bool = False) -> None:
        """Record the duration of a step; `has_paused`: the step paused some decodes."""
        self._idle_until(now - seconds)
        self._decay(seconds)
        self._seconds += seconds
        self._num_tokens += not has_paused
        self._at_s = max(self._at_s, now)

    def under_load(self, load: RunningLoad, now: float) -> float:
        """Return the inter-token latency under the current load, seconds: the recent average, but
        at least the predicted time of a step with all decodes and one more.
        """
        self._idle_until(now)
        min_s = self._fit.decode_error.mean * self._fit.step_time_s(
            num_prefill_tokens=0,
            num_decodes=load.num_decodes + 1,
            num_context_tokens=load.num_context_tokens,
        )
        return max(self._seconds / self._num_tokens if self._num_tokens else 0.0, min_s)

    def _idle_until(self, now: float) -> None:
        idle_s, alone_s = now - self._at_s, self.alone_s
        if idle_s <= alone_s:
            return
        self._at_s = now
        if idle_s > 10.0 * _MEMORY_S or alone_s <= 0.0:
            self._seconds = self._num_tokens = 0.0
            return
        self._decay(idle_s)
        self._seconds += idle_s
        self._num_tokens += idle_s / alone_s

    def _decay(self, seconds: float) -> None:
        keep = math.exp(-seconds / _MEMORY_S)
        self._seconds *= keep
        self._num_tokens *= keep


class StandingQueues:
    """The share of recent time in which requests waited, by tenant and class.

    Sampled at arrivals: each sample covers the time since the previous arrival. A queue is
    identified by priority class and tenant.
    """

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        self._shares: dict[tuple[int, str], tuple[float, float]] = {}

    def note_arrival(self, queue: tuple[int, str], now: float, *, finds_queue: bool) -> None:
        """Record an arrival; `finds_queue`: requests of the same tenant and class are already
        waiting.
        """
        share, at_s = self._shares.pop(queue, (0.0, -math.inf))
        gain = -math.expm1(-max(now - at_s, 0.0) / _MEMORY_S)
        self._shares[queue] = (share + gain * (finds_queue - share), now)
        if len(self._shares) > _MAX_QUEUES:
            del self._shares[next(iter(self._shares))]

    def share(self, queue: tuple[int, str]) -> float:
        """Return how persistent the queue of a class and tenant is: the share of recent time in
        which requests waited, divided by `_FULL_CONTENTION`, at most 1.
        """
        return min(self._shares.get(queue, (0.0, 0.0))[0] / _FULL_CONTENTION, 1.0)


class PrefillCredit:
    """Tracks how much other load lowers the chances of the recently admitted requests.

    The chance of a request is the probability that it completes before its deadline. It is compared
    with the chance that the request would have on an idle machine. One request may fall below
    `_MIN_SHARE_UNDER_LOAD` of that as long as the average over the prompt tokens does not.
    """

    __slots__ = ("_at_s", "_kept", "_tokens")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._kept = 0.0
        self._tokens = 0.0

    def min_share(self, num_tokens: int, now: float) -> float:
        """Return the minimum chance of a new request whose prompt has `num_tokens` tokens, as a
        fraction of its chance on an idle machine: 0 to `_MIN_SHARE_UNDER_LOAD`.
        """
        self._decay(now)
        credit = self._kept - _MIN_SHARE_UNDER_LOAD * self._tokens
        return min(max(_MIN_SHARE_UNDER_LOAD - credit / num_tokens, 0.0), _MIN_SHARE_UNDER_LOAD)

    def note(self, num_tokens: int, share: float, now: float) -> None:
        """Record a request that joins the queue, with `num_tokens` prompt tokens; `share`: its
        chance divided by its chance on an idle machine.
        """
        self._decay(now)
        self._kept += num_tokens * min(share, 1.0)
        self._tokens += num_tokens

    def _decay(self, now: float) -> None:
        keep = math.exp(-max(now - self._at_s, 0.0) / _CREDIT_MEMORY_S)
        self._kept *= keep
        self._tokens *= keep
        self._at_s = max(self._at_s, now)


class Slowdown:
    """The ratio of the actual to the predicted time that requests take after their admission.

    Requests are weighted by their computed prompt tokens, because this computation is wasted if the
    output is late. The weight of a request decays exponentially with its age. Once the mean age
    exceeds `_SLOWDOWN_MEMORY_S`, the excess of the ratio over 1 also fades linearly, to 0 at twice
    that age.
    """

    __slots__ = ("_age", "_at_s", "_predicted", "_taken")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._predicted = 0.0
        self._taken = 0.0
        self._age = 0.0

    def factor(self, now: float) -> float:
        """Return the factor for predicted times: 1 to `_MAX_SLOWDOWN`."""
        self._decay(now)
        return 1.0 + self._excess * min(max(self._left_s / _SLOWDOWN_MEMORY_S, 0.0), 1.0)

    def seconds_until(self, factor: float, now: float) -> float:
        """Return the seconds until the slowdown has faded to `factor`.

        0 if it already has, or never will because `factor` is below 1.
        """
        self._decay(now)
        excess = self._excess
        if not 1.0 <= factor < 1.0 + excess:
            return 0.0
        return max(self._left_s - _SLOWDOWN_MEMORY_S * (factor - 1.0) / excess, 0.0)

    def note(self, num_tokens: int, *, taken_s: float, predicted_s: float, now: float) -> None:
        """Record the actual and the predicted time of a request that computed `num_tokens` of its
        prompt.
        """
        self._decay(now)
        self._taken += num_tokens * taken_s
        self._predicted += num_tokens * predicted_s

    @property
    def _excess(self) -> float:
        """The factor minus 1, before fading."""
        excess = (self._taken - self._predicted) / (self._predicted + _SLOWDOWN_PRIOR)
        return min(max(excess, 0.0), _MAX_SLOWDOWN - 1.0)

    @property
    def _left_s(self) -> float:
        """Seconds until the excess has faded to 0, without further samples."""
        mean_age_s = self._age / self._predicted if self._predicted else math.inf
        return 2.0 * _SLOWDOWN_MEMORY_S - mean_age_s

    def _decay(self, now: float) -> None:
        seconds = max(now - self._at_s, 0.0)
        keep = math.exp(-seconds / _SLOWDOWN_MEMORY_S)
        self._age = keep * (self._age + seconds * self._predicted)
        self._taken *= keep
        self._predicted *= keep
        self._at_s = max(self._at_s, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The prediction for a complete output.

    Attributes:
        chance: The probability that the deadline is met.
        required: The minimum chance at which the request is admitted.
        needed_s: How many seconds from now the deadline would have to be for `chance` to equal
            `required`.
        slowdown_s: Seconds until the slowdown has faded so far that `chance` reaches `required`; 0
            if the slowdown is not the reason.
    """

    chance: float
    required: float
    needed_s: float
    slowdown_s: float


class CompletionPredictor:
    """Predicts the probability that an output is complete before its deadline.

    `lengths`: the learned output lengths. `min_chance`: the minimum chance of a request; 0 disables
    predictions by probability.
    """

    def __init__(
        self, min_chance: float, fit: StepFit, *, arrays: SlotArrays, running: RunningSet
    ) -> None:
        self.lengths = OutputLengths()
        self.token_time = TokenTime(fit)
        self.standing = StandingQueues()
        self.min_chance = min_chance
        self._arrays = arrays
        self._running = running
        self._check_s = -math.inf
        self.credit = PrefillCredit()
        self.slowdown = Slowdown()
        self.exploration = Exploration()

    def is_check_due(self, now: float) -> bool:
        """Return whether a check of running requests is due; if so, start the next interval."""
        if self.min_chance <= 0.0 or now < self._check_s:
            return False
        self._check_s = now + _CHECK_EVERY_S
        return True

    def note_arrival(self, request: Request, now: float, *, finds_queue: bool) -> None:
        """Record the arrival of a request with a deadline. Unless its output length is known, also
        set its `is_new`. `finds_queue`: see `StandingQueues.note_arrival`.
        """
        self.standing.note_arrival(tenant_class_of(request), now, finds_queue=finds_queue)
        spec = request.spec
        if not _is_certain(spec):  # output of known length: no sample
            num_seen = self.lengths.num_seen_of(spec.tenant)
            request.is_new = self.exploration.explores_new_tenant(spec.tenant, num_seen, now)

    def note_end(self, request: Request, num_tokens: int, now: float, *, is_cut: bool) -> None:
        """Record that a running request ended after `num_tokens` output tokens, for the slowdown
        and the output lengths. `is_cut`: no stop token ended the output.

        An output that no stop token could have ended is not a sample of the lengths.
        """
        spec, predicted = request.spec, request.predicted_time
        if predicted is not None and not request.num_preemptions:
            taken_s = now - predicted.at_s
            predicted_s = predicted.prefill_s + max(num_tokens - 1, 0) * predicted.token_s
            # A request that ended during prefill is a sample only if the prefill took longer than
            # predicted.
            if num_tokens or taken_s > predicted_s:
                self.slowdown.note(
                    request.num_uncached_tokens, taken_s=taken_s, predicted_s=predicted_s, now=now
                )
        if is_cut and not _may_end(spec):
            return
        self.lengths.observe(
            num_tokens, is_cut=is_cut, tenant=spec.tenant, max_tokens=spec.max_tokens
        )

    def distribution(self, request: Request) -> LengthDistribution | None:
        """Return the distribution of the request's output length; None if predictions by
        probability are disabled, or if the length is uncertain and there are too few samples.
        """
        spec = request.spec
        if self.min_chance <= 0.0:
            return None
        if _is_certain(spec):
            return UNENDING
        if request.is_new:
            return None
        return self.lengths.distribution(spec.tenant, spec.max_tokens, lambda: self._outputs(spec))

    def _outputs(self, spec: RequestSpec) -> RunningOutputs:
        """Return the lengths of the running outputs, as censored samples for the distribution of
        this request.
        """
        # As in `note_end`: an output that only its limit can end is no evidence of lengths.
        running = [other for other in self._running if _may_end(other.spec)]
        slots = [request.slot for request in running]
        octave = spec.max_tokens.bit_length()
        return RunningOutputs(
            num_tokens=self._arrays.num_tokens[slots] - self._arrays.num_prompt[slots],
            is_of_tenant=np.array([other.spec.tenant == spec.tenant for other in running], bool),
            has_limit=np.array(
                [other.spec.max_tokens.bit_length() == octave for other in running], bool
            ),
        )

    def min_further_tokens(self, request: Request) -> int:
        """Return the smallest number of further tokens within which the request ends with a
        probability of at least `min_chance`.

        If there is no distribution of its length, return the minimum that its bounds allow.
        """
        bounds = bounds_of(request)
        distribution = self.distribution(request)
        if distribution is None:
            return bounds.least - bounds.num_known
        return distribution.tokens_with(self.min_chance, bounds) - bounds.num_known

    def running_late(self, token_s: float, now: float) -> list[tuple[Request, float]]:
        """Return the running requests that will probably be late, each with its chance to meet its
        deadline given its output so far: the requests with a chance below `min_chance`.

        `token_s`: the predicted seconds per token. Requests that have no token yet, and requests
        exempt from rejection (`is_trial`), are skipped.
        """
        arrays, columns = self._arrays, slice(0, self._running.high_water)
        left_s = arrays.deadline[columns] - now
        num_left = arrays.max_total[columns] - arrays.num_tokens[columns]
        found: list[tuple[Request, float]] = []
        # A request past its deadline ends for that reason.
        for slot in np.flatnonzero((num_left * token_s > left_s) & (left_s > 0.0)).tolist():
            request = self._running.request_at(slot)
            if request is None or request.first_token_s == NO_TIME or request.is_trial:
                continue
            distribution = self.distribution(request)
            if distribution is None:
                continue
            spec = request.spec
            bounds = OutputBounds(
                max_tokens=spec.max_tokens,
                min_tokens=spec.min_tokens,
                num_known=int(arrays.num_tokens[slot] - arrays.num_prompt[slot]),
            )
            num_tokens = bounds.num_known + int(max(float(left_s[slot]), 0.0) / token_s)
            chance = distribution.chance_within(num_tokens, bounds)
            if chance < self.min_chance:
                found.append((request, chance))
        return found

    def chance_in(self, request: Request, seconds: float) -> float | None:
        """Return the probability that the request, decoding alone, ends within `seconds` of its
        next token.

        None without a distribution of its length.
        """
        distribution = self.distribution(request)
        if distribution is None:
            return None
        bounds = bounds_of(request)
        num_tokens = bounds.num_known + _tokens_in(seconds, self.token_time.alone_s)
        return distribution.chance_within(num_tokens, bounds)

    def assess(
        self,
        request: Request,
        *,
        queue_s: float,
        prefill_s: float,
        token_s: float,
        now: float,
    ) -> Completion | None:
        """Return the prediction for a waiting or new request; None without a distribution of its
        length.

        For a waiting request, also store the predicted times in its `predicted_time`. For a new
        request whose chance suffices, also record the chance in `credit`.

        `queue_s`: seconds until its admission. `prefill_s`: seconds from its admission to its next
        token. `token_s`: see `TokenTime.under_load`.
        """
        distribution = self.distribution(request)
        if distribution is None:
            return None
        spec, bounds = request.spec, bounds_of(request)
        if request.ticket >= 0:
            request.predicted_time = PredictedTime(now, prefill_s, token_s)
        slowdown = self.slowdown.factor(now)
        prefill_s *= slowdown
        token_s *= slowdown

        def chance_in(seconds: float, each_s: float = token_s) -> float:
            num_tokens = bounds.num_known + _tokens_in(seconds, each_s)
            return distribution.chance_within(num_tokens, bounds)

        left_s = spec.deadline_s - now - prefill_s
        chance = chance_in(left_s - queue_s)
        required = self.min_chance
        budget_s = spec.deadline_s - spec.arrival_s
        # After a preemption the usual time is unknown, and most of the compute is spent.
        if not bounds.num_known:
            usual_s = max(_STANDING_WAIT_SHARE * budget_s, prefill_s)
            standing = self.standing.share(tenant_class_of(request))
            fresh = standing * chance_in(budget_s - usual_s - prefill_s)
            alone = chance_in(left_s, self.token_time.alone_s)
            if request.ticket >= 0:
                required = max(required, _ADMISSION_SHARE * fresh, _ADMISSION_SHARE * alone)
            else:
                least = self.credit.min_share(len(request.tokens), now)
                required = max(required, fresh, least * alone)
                if chance >= required:
                    share = chance / alone if alone > 0.0 else 1.0
                    self.credit.note(len(request.tokens), share, now)
        num_tokens = distribution.tokens_with(required, bounds) - bounds.num_known
        own_s = prefill_s + (num_tokens - 1) * token_s
        enough = slowdown * (budget_s - queue_s) / own_s if own_s > 0.0 else math.inf
        return Completion(
            chance=chance,
            required=required,
            needed_s=queue_s + own_s,
            slowdown_s=self.slowdown.seconds_until(enough, now),
        )


def bounds_of(request: Request) -> OutputBounds:
    """Return the bounds of the output of a waiting or new request; `num_known`: the tokens that it
    generated before a preemption or replay.
    """
    spec = request.spec
    return OutputBounds(
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        num_known=len(request.tokens) - spec.num_original_prompt_tokens,
    )


def tenant_class_of(request: Request) -> tuple[int, str]:
    """Return the priority class and the tenant: the key of the queue that the request waits in."""
    return request.spec.priority, request.spec.tenant


def _is_certain(spec: RequestSpec) -> bool:
    """Return whether the output will have exactly `max_tokens` tokens, if neither a deadline nor
    the client ends it.
    """
    return spec.min_tokens >= spec.max_tokens


def _may_end(spec: RequestSpec) -> bool:
    """Return whether a token can end the output before its limit."""
    return bool(spec.stop_ids) and not _is_certain(spec)


def _tokens_in(seconds: float, token_s: float) -> int:
    """Return the number of tokens generated within `seconds` of the first one, including it."""
    if seconds < 0.0:
        return 0
    return 1 + int(min(seconds / token_s, 2.0**31)) if token_s > 0.0 else 2**31
