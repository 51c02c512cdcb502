"""Whether a request will have its whole answer before its deadline, as a probability.

Owns what the probability is made from besides the lengths of outputs: how fast running requests
advance, and where queues stand. Does not know the queue itself, nor what a refusal looks like.

- **Chance.** With the time that is left after queue and prefill, and t the time between two tokens
  of a running request as it was lately, an output may have n = 1 + left / t tokens; the chance is
  the probability that it ends within n (output_lengths.py).
- **Smallest chance.** With less than `min_deadline_chance` a request is refused, dropped or, while
  it runs, given up.
- **Beside others.** What those who run and wait leave of the chance on an idle machine must be
  96 %, on average over the prompt tokens let in lately. Less is let in where the average
  allows it. So no more runs at once than leaves most of it time to end, and a tenant whose outputs
  are long is refused while the machine is too slow for them instead of being computed in vain.
- **Standing queue.** A queue that stands serves nobody: what enters is as much as what leaves, and
  every request in it has lost of its time what the queue is long, so that all of them end at the
  edge of their deadlines and many beyond it, with all of their compute wasted (the domino effect of
  deadline order under overload: Buttazzo, *Hard Real-Time Computing Systems*, chapter 9). So the
  longer the queue of a tenant's class has stood, the nearer must a request come to the chance that
  it has after a wait of a fortieth of its time (after Nichols and Jacobson, "Controlling Queue
  Delay", 2012). A burst on a machine that keeps up may wait as far as the average above allows.

A chance that is certain, for a short `max_tokens`, loses nothing by waiting and is not affected.

What is let in to learn, though it may be late, is in exploration.py.
"""

import math
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.exploration import Exploration
from penstock.scheduler.forecast import Load
from penstock.scheduler.output_lengths import (
    LengthDistribution,
    OutputBounds,
    OutputLengths,
    RunningOutputs,
)
from penstock.scheduler.request import NO_TIME, Request, RequestSpec
from penstock.scheduler.running import Running
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_fit import StepFit

_MEMORY_S = 10.0
"""How long a queue must stand to count as one that stays, and the memory of the time per token."""
_STANDING_WAIT_SHARE = 0.025
"""Of a request's time: what a wait in a queue that stands may take of it."""
_FULL_CONTENTION = 0.5
"""Where somebody waits for this share of the time the queue counts as one that never empties."""
_ADMISSION_SHARE = 0.8
"""At admission: what was let into the queue has waited already, and is not dropped for a little."""
_BESIDE_OTHERS = 0.96
"""Of the chance on an idle machine: what must be left of it beside the others."""
_CREDIT_MEMORY_S = 60.0
_MAX_LINES = 4096
_CHECK_EVERY_S = 0.25
"""How often running requests are looked at."""


class TokenTime:
    """The time between two tokens of a running request, by the steps of the last seconds.

    Time over steps, both fading. While the machine is idle it counts as many steps as it could have
    made for one request alone: a step full of prefill in an idle minute does not slow anybody.
    """

    __slots__ = ("_at_s", "_fit", "_num_tokens", "_seconds")

    def __init__(self, fit: StepFit) -> None:
        self._fit = fit
        self._at_s = -math.inf
        self._seconds = 0.0
        self._num_tokens = 0.0

    @property
    def alone_s(self) -> float:
        """For a request that has the machine to itself."""
        return self._fit.step_time_s(num_prefill_tokens=0, num_decodes=1, num_context_tokens=0)

    def note_step(self, seconds: float, now: float) -> None:
        """A step ended that took so long."""
        self._idle_until(now - seconds)
        self._fade(seconds)
        self._seconds += seconds
        self._num_tokens += 1.0
        self._at_s = max(self._at_s, now)

    def beside(self, load: Load, now: float) -> float:
        """Beside those who run: what it was lately, and no less than a step of all decodes."""
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
    """For each tenant and class the share of recent time in which somebody waited there.

    Arrivals are what looks: each finds the queue as it was since the last one.
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], tuple[float, float]] = {}

    def note_arrival(self, line: tuple[int, str], now: float, *, finds_queue: bool) -> None:
        """A request arrives; `finds_queue`: others wait already where it would."""
        share, at_s = self._lines.pop(line, (0.0, -math.inf))
        gain = -math.expm1(-max(now - at_s, 0.0) / _MEMORY_S)
        self._lines[line] = (share + gain * (finds_queue - share), now)
        if len(self._lines) > _MAX_LINES:
            del self._lines[next(iter(self._lines))]

    def share(self, line: tuple[int, str]) -> float:
        """0 for a queue that is mostly empty, 1 for one that never empties."""
        return min(self._lines.get(line, (0.0, 0.0))[0] / _FULL_CONTENTION, 1.0)


class PrefillCredit:
    """What the others may take of chances, held against the prompts that were let in lately.

    While on average at most `1 - _BESIDE_OTHERS` of their tokens are likely to be computed in vain
    for the sake of others, a single request may have less.
    """

    __slots__ = ("_at_s", "_kept", "_tokens")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._kept = 0.0
        self._tokens = 0.0

    def least_share(self, num_tokens: int, now: float) -> float:
        """The share of its chance alone that a prompt of this length must have now."""
        self._fade(now)
        credit = self._kept - _BESIDE_OTHERS * self._tokens
        return min(max(_BESIDE_OTHERS - credit / num_tokens, 0.0), _BESIDE_OTHERS)

    def note(self, num_tokens: int, share: float, now: float) -> None:
        """A prompt is let in with so much of its chance alone."""
        self._fade(now)
        self._kept += num_tokens * min(share, 1.0)
        self._tokens += num_tokens

    def _fade(self, now: float) -> None:
        keep = math.exp(-max(now - self._at_s, 0.0) / _CREDIT_MEMORY_S)
        self._kept *= keep
        self._tokens *= keep
        self._at_s = max(self._at_s, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What is predicted of a whole answer.

    `chance`: that it meets its deadline; `required`: what it must have to be worth its compute;
    `needed_s`: seconds from now after which it would have that.
    """

    chance: float
    required: float
    needed_s: float


class CompletionPredictor:
    """Chances of whole answers. `lengths`: what outputs are learned from.

    `min_chance`: 0 for no judgement by probabilities at all.
    """

    def __init__(
        self, min_chance: float, fit: StepFit, *, arrays: SlotArrays, running: Running
    ) -> None:
        self.lengths = OutputLengths()
        self.token_time = TokenTime(fit)
        self.standing = StandingQueues()
        self.min_chance = min_chance
        self._arrays = arrays
        self._running = running
        self._check_s = -math.inf
        self.credit = PrefillCredit()
        self.exploration = Exploration()

    def is_check_due(self, now: float) -> bool:
        """Whether to look at running requests again."""
        if self.min_chance <= 0.0 or now < self._check_s:
            return False
        self._check_s = now + _CHECK_EVERY_S
        return True

    def note_arrival(self, request: Request, now: float, *, finds_queue: bool) -> None:
        """One with a deadline arrives; `finds_queue`: see `StandingQueues`."""
        self.standing.note_arrival(line_of(request), now, finds_queue=finds_queue)
        spec = request.spec
        if spec.min_tokens < spec.max_tokens:  # otherwise there is nothing to learn
            num_seen = self.lengths.num_seen_of(spec.tenant)
            request.is_new = self.exploration.takes_new(spec.tenant, num_seen, now)

    def note_end(self, spec: RequestSpec, num_tokens: int, *, is_cut: bool) -> None:
        """A request that ran has ended with so many tokens; `is_cut`: not by itself.

        Without a token that could have ended it, its limit says nothing of others' lengths.
        """
        if is_cut and not spec.stop_ids:
            return
        self.lengths.observe(
            num_tokens, is_cut=is_cut, tenant=spec.tenant, max_tokens=spec.max_tokens
        )

    def distribution(self, request: Request) -> LengthDistribution | None:
        """Of the request's output; None where chances are not judged, or too little is known."""
        if self.min_chance <= 0.0 or request.is_new:
            return None
        spec = request.spec
        return self.lengths.of(spec.tenant, spec.max_tokens, lambda: self._outputs(spec))

    def _outputs(self, spec: RequestSpec) -> RunningOutputs:
        """Of what runs, as seen from this request."""
        # As in `note_end`: what nothing but its limit ends says nothing of lengths.
        running = [other for other in self._running if other.spec.stop_ids]
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
        """Tokens that the request still generates, but for the smallest chance of fewer."""
        bounds = bounds_of(request)
        distribution = self.distribution(request)
        if distribution is None:
            return bounds.least - bounds.num_known
        return distribution.tokens_with(self.min_chance, bounds) - bounds.num_known

    def running_late(self, token_s: float, now: float) -> list[tuple[Request, float]]:
        """Running requests whose chance is below the smallest, with their chances.

        Judged by the lengths of outputs that were at least as long as theirs are already.
        """
        arrays, columns = self._arrays, slice(0, self._running.high_water)
        left_s = arrays.deadline[columns] - now
        num_left = arrays.max_total[columns] - arrays.num_tokens[columns]
        found: list[tuple[Request, float]] = []
        # What is past its deadline already ends by that.
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
        """Probability that it ends in so much time from its next token on, decoding alone."""
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
        """What chance a waiting or new request has; None where chances are not judged.

        `queue_s`, `prefill_s`: from now to its admission, and from there to its next token.
        `token_s`: see `TokenTime.beside`.
        """
        distribution = self.distribution(request)
        if distribution is None:
            return None
        spec, bounds = request.spec, bounds_of(request)

        def chance_in(seconds: float, each_s: float = token_s) -> float:
            num_tokens = bounds.num_known + _tokens_in(seconds, each_s)
            return distribution.chance_within(num_tokens, bounds)

        left_s = spec.deadline_s - now - prefill_s
        chance = chance_in(left_s - queue_s)
        required = self.min_chance
        # After a preemption there is no time that is usual, and most of the compute is spent.
        if not bounds.num_known:
            budget_s = spec.deadline_s - spec.arrival_s
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
        return Completion(
            chance=chance,
            required=required,
            needed_s=queue_s + prefill_s + (num_tokens - 1) * token_s,
        )


def bounds_of(request: Request) -> OutputBounds:
    """Of its output as far as it is generated while it waits."""
    spec = request.spec
    return OutputBounds(
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        num_known=len(request.tokens) - spec.num_original_prompt_tokens,
    )


def line_of(request: Request) -> tuple[int, str]:
    """Requests of one class and tenant wait for each other."""
    return request.spec.priority, request.spec.tenant


def _tokens_in(seconds: float, token_s: float) -> int:
    """Tokens in so much time from the first one on, that one included."""
    if seconds < 0.0:
        return 0
    return 1 + int(min(seconds / token_s, 2.0**31)) if token_s > 0.0 else 2**31
