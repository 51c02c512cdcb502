"""The probability that a request completes before its deadline.

Owns the inputs of the probability other than output lengths: how fast running requests make
progress, and where queues persist. Does not know the queue itself, nor how a rejection is reported.

- **Chance.** With `left` the time that remains after queue and prefill, and t the recent time
  between two tokens of a running request, an output may have n = 1 + left / t tokens; the chance is
  the probability that it ends within n (output_lengths.py).
- **Smallest chance.** A request with less than `min_deadline_chance` is refused, dropped or, while
  it runs, ended.
- **Slowdown.** Times are predicted for the present load. Requests admitted later make them longer,
  so they are multiplied by the ratio of actual to predicted time of recent requests.
- **With other load.** The chance next to the running and waiting requests must be 94 % of the
  chance on an idle machine, on average over the recently admitted prompt tokens. A request with a
  lower one is admitted where the average allows it. So the number of running requests leaves most
  of them time to complete, and a tenant with long outputs is refused while the machine is too slow
  for them instead of being computed in vain.
- **Standing queue.** A standing queue helps no request: arrivals equal departures, and every
  request has lost the time it spent in the queue, so that all of them end close to their deadlines
  and many after them, with all of their compute wasted (the domino effect of deadline order under
  overload: Buttazzo, *Hard Real-Time Computing Systems*, chapter 9). So the longer the queue of a
  tenant's class has persisted, the closer a request's chance must be to its chance after a wait of
  a fortieth of its time (after Nichols and Jacobson, "Controlling Queue Delay", 2012). A burst on a
  machine that keeps up may wait as far as the average above allows.

A certain chance, for a short `max_tokens`, does not fall while the request waits and is not
affected. An output that only its limit ends has a certain length, which is used from the first
request on.

output_lengths.py defines which requests are admitted to learn lengths although they may be late.
"""

import math
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.forecast import Load
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
"""How long a queue must persist to count as standing; also the memory of the time per token."""
_STANDING_WAIT_SHARE = 0.025
"""Share of a request's time that a wait in a standing queue may take."""
_FULL_CONTENTION = 0.5
"""A queue with requests waiting for this share of the time counts as one that never empties."""
_ADMISSION_SHARE = 0.8
"""Factor at admission: a request that has waited is not dropped for a small shortfall."""
_BESIDE_OTHERS = 0.94
"""Minimum chance next to other load, as a share of the chance on an idle machine."""
_CREDIT_MEMORY_S = 60.0
_SLOWDOWN_MEMORY_S = 30.0
_MAX_SLOWDOWN = 2.0
"""A limit, because one stall does not predict another."""
_NO_SLOWDOWN = 3_000.0
"""Prior of token seconds that were predicted well, so that a few requests weigh little."""
_MAX_LINES = 4096
_CHECK_EVERY_S = 0.25
"""How often running requests are checked."""


class TokenTime:
    """The time between two tokens of a running request, over the steps of the last seconds.

    Time divided by steps, both decaying. A step that leaves decodes out for a light tenant's prompt
    counts as time without a token, so that predictions include such pauses. Idle time counts as the
    steps that one request alone could have made in it: a step full of prefill in an idle minute
    delays no request.
    """

    __slots__ = ("_at_s", "_fit", "_num_tokens", "_seconds")

    def __init__(self, fit: StepFit) -> None:
        self._fit = fit
        self._at_s = -math.inf
        self._seconds = 0.0
        self._num_tokens = 0.0

    @property
    def alone_s(self) -> float:
        """Time between tokens of a request that runs alone."""
        return self._fit.step_time_s(num_prefill_tokens=0, num_decodes=1, num_context_tokens=0)

    def note_step(self, seconds: float, now: float, *, has_paused: bool = False) -> None:
        """Record the duration of a step; `has_paused`: the step left decodes out."""
        self._idle_until(now - seconds)
        self._fade(seconds)
        self._seconds += seconds
        self._num_tokens += not has_paused
        self._at_s = max(self._at_s, now)

    def beside(self, load: Load, now: float) -> float:
        """Return the time between tokens under the current load: the recent one, at least a step of
        all decodes.
        """
        self._idle_until(now)
        least_s = self._fit.decode_error.mean * self._fit.step_time_s(
            num_prefill_tokens=0,
            num_decodes=load.num_decodes + 1,
            num_context_tokens=load.num_context_tokens,
        )
        return max(self._seconds / self._num_tokens if self._num_tokens else 0.0, least_s)

    def _idle_until(self, now: float) -> None:
        idle_s, alone_s = now - self._at_s, self.alone_s
        if idle_s <= alone_s:
            return
        self._at_s = now
        if idle_s > 10.0 * _MEMORY_S or alone_s <= 0.0:
            self._seconds = self._num_tokens = 0.0
            return
        self._fade(idle_s)
        self._seconds += idle_s
        self._num_tokens += idle_s / alone_s

    def _fade(self, seconds: float) -> None:
        keep = math.exp(-seconds / _MEMORY_S)
        self._seconds *= keep
        self._num_tokens *= keep


class StandingQueues:
    """The share of recent time in which requests waited, by tenant and class.

    Sampled at arrivals: each sample stands for the time since the last arrival.
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], tuple[float, float]] = {}

    def note_arrival(self, line: tuple[int, str], now: float, *, finds_queue: bool) -> None:
        """Record an arrival; `finds_queue`: other requests of its tenant and class wait already."""
        share, at_s = self._lines.pop(line, (0.0, -math.inf))
        gain = -math.expm1(-max(now - at_s, 0.0) / _MEMORY_S)
        self._lines[line] = (share + gain * (finds_queue - share), now)
        if len(self._lines) > _MAX_LINES:
            del self._lines[next(iter(self._lines))]

    def share(self, line: tuple[int, str]) -> float:
        """Return 0 for a queue that is mostly empty, up to 1 for one that never empties."""
        return min(self._lines.get(line, (0.0, 0.0))[0] / _FULL_CONTENTION, 1.0)


class PrefillCredit:
    """The chance lost to other load, accounted for the recently admitted prompts.

    A single request may have a lower chance while on average at most `1 - _BESIDE_OTHERS` of the
    prompt tokens are likely to be wasted because of other load.
    """

    __slots__ = ("_at_s", "_kept", "_tokens")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._kept = 0.0
        self._tokens = 0.0

    def least_share(self, num_tokens: int, now: float) -> float:
        """Return the minimum chance of a prompt of this length, as a share of its chance alone."""
        self._fade(now)
        credit = self._kept - _BESIDE_OTHERS * self._tokens
        return min(max(_BESIDE_OTHERS - credit / num_tokens, 0.0), _BESIDE_OTHERS)

    def note(self, num_tokens: int, share: float, now: float) -> None:
        """Record an admitted prompt; `share`: its chance as a share of its chance alone."""
        self._fade(now)
        self._kept += num_tokens * min(share, 1.0)
        self._tokens += num_tokens

    def _fade(self, now: float) -> None:
        keep = math.exp(-max(now - self._at_s, 0.0) / _CREDIT_MEMORY_S)
        self._kept *= keep
        self._tokens *= keep
        self._at_s = max(self._at_s, now)


class Slowdown:
    """The ratio of the actual to the predicted time of requests, from their admission on.

    Prompts are weighted by their computed tokens, which are wasted if the answer is late. All sums
    decay. The excess over 1 also fades, once its requests are on average as old as under steady
    load: it is 0 after another `_SLOWDOWN_MEMORY_S`, whatever their weight next to later requests.
    """

    __slots__ = ("_age", "_at_s", "_predicted", "_taken")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._predicted = 0.0
        self._taken = 0.0
        self._age = 0.0

    def factor(self, now: float) -> float:
        """Return the factor for predicted times: 1 to `_MAX_SLOWDOWN`."""
        self._fade(now)
        return 1.0 + self._excess * min(max(self._left_s / _SLOWDOWN_MEMORY_S, 0.0), 1.0)

    def seconds_until(self, factor: float, now: float) -> float:
        """Return the seconds until the factor has faded to `factor`; 0 below 1, which it never
        reaches.
        """
        self._fade(now)
        excess = self._excess
        if not 1.0 <= factor < 1.0 + excess:
            return 0.0
        return max(self._left_s - _SLOWDOWN_MEMORY_S * (factor - 1.0) / excess, 0.0)

    def note(self, num_tokens: int, *, taken_s: float, predicted_s: float, now: float) -> None:
        """Record a request that computed `num_tokens` of its prompt."""
        self._fade(now)
        self._taken += num_tokens * taken_s
        self._predicted += num_tokens * predicted_s

    @property
    def _excess(self) -> float:
        """The excess of the factor over 1, before it fades."""
        excess = (self._taken - self._predicted) / (self._predicted + _NO_SLOWDOWN)
        return min(max(excess, 0.0), _MAX_SLOWDOWN - 1.0)

    @property
    def _left_s(self) -> float:
        """Seconds until the excess has faded to 0, without further requests."""
        mean_age_s = self._age / self._predicted if self._predicted else math.inf
        return 2.0 * _SLOWDOWN_MEMORY_S - mean_age_s

    def _fade(self, now: float) -> None:
        seconds = max(now - self._at_s, 0.0)
        keep = math.exp(-seconds / _SLOWDOWN_MEMORY_S)
        self._age = keep * (self._age + seconds * self._predicted)
        self._taken *= keep
        self._predicted *= keep
        self._at_s = max(self._at_s, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The prediction for a complete output.

    `chance`: the probability that it meets its deadline; `required`: the minimum to be worth its
    compute; `needed_s`: the time from now with which it would have `required`. `slowdown_s`:
    seconds until the slowdown has faded enough for that, 0 if the slowdown is not the reason.
    """

    chance: float
    required: float
    needed_s: float
    slowdown_s: float


class CompletionPredictor:
    """Predicts the chances of complete outputs. `lengths`: the learned output lengths.

    `min_chance`: 0 turns predictions by probability off.
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
        """Return whether to check running requests again, and start the next interval if so."""
        if self.min_chance <= 0.0 or now < self._check_s:
            return False
        self._check_s = now + _CHECK_EVERY_S
        return True

    def note_arrival(self, request: Request, now: float, *, finds_queue: bool) -> None:
        """Record the arrival of a request with a deadline; `finds_queue`: see `StandingQueues`."""
        self.standing.note_arrival(line_of(request), now, finds_queue=finds_queue)
        spec = request.spec
        if not _is_certain(spec):  # otherwise there is nothing to learn
            num_seen = self.lengths.num_seen_of(spec.tenant)
            request.is_new = self.exploration.takes_new(spec.tenant, num_seen, now)

    def note_end(self, request: Request, num_tokens: int, now: float, *, is_cut: bool) -> None:
        """Record that a running request ended after `num_tokens`; `is_cut`: truncated.

        The limit of an output that no token could have ended is no evidence of other lengths.
        """
        spec, predicted = request.spec, request.predicted_time
        if predicted is not None and not request.num_preemptions:
            taken_s = now - predicted.at_s
            predicted_s = predicted.prefill_s + max(num_tokens - 1, 0) * predicted.token_s
            # A request that ended in its prefill counts only if the prefill already took too long.
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
        """Return the distribution of the request's output length; None without predictions, or if
        the length is uncertain and there are too few samples.
        """
        spec = request.spec
        if self.min_chance <= 0.0:
            return None
        if _is_certain(spec):
            return UNENDING
        if request.is_new:
            return None
        return self.lengths.of(spec.tenant, spec.max_tokens, lambda: self._outputs(spec))

    def _outputs(self, spec: RequestSpec) -> RunningOutputs:
        """Return the running outputs, as samples for the distribution of this request."""
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

    def least_tokens(self, request: Request) -> int:
        """Return how many more tokens the request will generate, except with less than the minimum
        chance.
        """
        bounds = bounds_of(request)
        distribution = self.distribution(request)
        if distribution is None:
            return bounds.least - bounds.num_known
        return distribution.tokens_with(self.min_chance, bounds) - bounds.num_known

    def running_late(self, token_s: float, now: float) -> list[tuple[Request, float]]:
        """Return running requests with less than the minimum chance, each with its chance, given
        the length that its output already has.
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
        """Return the probability that the request ends within `seconds` of its next token, decoding
        alone.
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
        """Return the chance of a waiting or new request; None without predictions.

        `queue_s`, `prefill_s`: seconds from now to its admission, and from its admission to its
        next token. `token_s`: see `TokenTime.beside`.
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
            standing = self.standing.share(line_of(request))
            fresh = standing * chance_in(budget_s - usual_s - prefill_s)
            alone = chance_in(left_s, self.token_time.alone_s)
            if request.ticket >= 0:
                required = max(required, _ADMISSION_SHARE * fresh, _ADMISSION_SHARE * alone)
            else:
                least = self.credit.least_share(len(request.tokens), now)
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
    """Return the bounds of the output, including tokens generated before."""
    spec = request.spec
    return OutputBounds(
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        num_known=len(request.tokens) - spec.num_original_prompt_tokens,
    )


def line_of(request: Request) -> tuple[int, str]:
    """Return the class and tenant whose requests wait for each other."""
    return request.spec.priority, request.spec.tenant


def _is_certain(spec: RequestSpec) -> bool:
    """Whether the output has all of `max_tokens`, unless a deadline or its client ends it."""
    return spec.min_tokens >= spec.max_tokens


def _may_end(spec: RequestSpec) -> bool:
    """Whether a token can end the output before its limit."""
    return bool(spec.stop_ids) and not _is_certain(spec)


def _tokens_in(seconds: float, token_s: float) -> int:
    """Return the number of tokens generated within `seconds` of the first one, including it."""
    if seconds < 0.0:
        return 0
    return 1 + int(min(seconds / token_s, 2.0**31)) if token_s > 0.0 else 2**31
