"""When a request will get its first and its last token, told before it runs.

Owns the formulas. Pure functions of the prices of a step, what the
machine can take, what runs and what stands ahead; does not know the queue, its order, or what a
refusal looks like.

The picture is a fluid one: work is conserved, everybody ahead goes first, and what is ahead needs a
number of steps n and a number of prefill tokens T, so that it takes

    n (price of a step with the decodes beside it) + T prefill_token_s.

n is set by whichever is scarcer, the prefill budget or places: max(T / budget, departures needed x
steps between departures) (the bottleneck law of operational analysis: Lazowska et al.,
*Quantitative System Performance*, chapter 5).

Two forecasts, and what each is for:

- `forecast`: running requests keep their pace and give up places at the rate that the mean output
  length says. RetryInfo and estimates told to clients come from this one.
- `forecast_alone`: nobody is ahead and nobody runs. What remains true whoever cancels, ends or is
  overtaken, as long as the prices hold; `hopeless_at_s` builds on it.
"""

from dataclasses import dataclass, replace

from penstock.scheduler.cost_model import StepPrices
from penstock.scheduler.request import NO_TIME
from penstock.scheduler.step_errors import EXACT, StepError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the machine can take, and at what price.

    `prices`: of a step, fitted or fixed. `max_prefill_tokens`: the token budget of a step.
    `prefill_error`, `decode_error`: how far off the prices are for steps with prefill and without.
    ValueError names the field that is off.
    """

    prices: StepPrices
    max_prefill_tokens: int
    prefill_error: StepError = EXACT
    decode_error: StepError = EXACT

    def __post_init__(self) -> None:
        if self.max_prefill_tokens < 1:
            raise ValueError(
                f"max_prefill_tokens must be at least 1, not {self.max_prefill_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs now, in aggregates; all zero when nothing does.

    `num_running`: requests with a slot, `num_decodes` of them past their prefill.
    `num_context_tokens`: sum over the running requests. `num_prefill_tokens`: what the others have
    still to prefill. `num_output_tokens`: what all of them are expected to generate still (see
    `output_lengths.py`). `num_used_blocks`, `num_free_blocks`: the latter as far as
    admission may take them; `num_free_slots` likewise. `prefill_budget_tokens`: what a step gives
    to prefill at present, 0 for the whole of the machine's budget.
    """

    num_running: int = 0
    num_decodes: int = 0
    num_context_tokens: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: float = 0.0
    num_free_slots: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    prefill_budget_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Those who wait and go first, in sums that a queue can keep as requests come and go.

    `num_prefill_tokens`: what they have to compute, prefixes that will be found taken off as far
    as they are known. `num_blocks`: what their admission takes. `num_output_tokens`: what they are
    expected to generate, 0 for as much each as is left to those who run.
    """

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_blocks: int = 0
    num_output_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What the request itself asks for.

    `num_prefill_tokens`: tokens to compute before its first token, at least 1. For a refusal pass
    the least that may be left: a prefix that somebody may have computed by then counts as found.
    `num_cached_tokens`: context that is there already. `num_blocks`: what its admission takes.
    `min_output_tokens`: it cannot end before; `expected_output_tokens`: see `output_lengths.py`.
    ValueError names the field that is off.
    """

    num_prefill_tokens: int
    num_cached_tokens: int = 0
    num_blocks: int = 0
    min_output_tokens: int = 1
    expected_output_tokens: float = 1.0

    def __post_init__(self) -> None:
        if self.num_prefill_tokens < 1:
            raise ValueError(
                f"num_prefill_tokens must be at least 1, not {self.num_prefill_tokens}"
            )
        if self.num_cached_tokens < 0:
            raise ValueError(
                f"num_cached_tokens must not be negative, not {self.num_cached_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds from now, one stretch after the other.

    `queue_left`, `prefill_left`: what of each is left once the error of the prices is taken off,
    as a share.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    queue_left: float = 1.0
    prefill_left: float = 1.0

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """Until the last token."""
        return self.queue_s + self.prefill_s + self.decode_s


def forecast(machine: Machine, want: Want, load: Load, ahead: Ahead) -> Forecast:
    """What is likely of a request that joins now.

    With P = `want.num_prefill_tokens`, B the prefill budget and t the price of a step beside the
    running decodes:

        prefill = ceil(P / B) t + P prefill_token_s + context of the chunks
        decode = (expected output - 1) (t with one decode more)
    """
    queue = _expected_queue(machine, want, load, ahead)
    num_chunks, _ = _chunks(want, _budget_tokens(machine, load))
    return Forecast(
        queue_s=queue.seconds,
        prefill_s=_expected_prefill_s(machine, want, load),
        decode_s=_expected_decode_s(machine, want, load),
        queue_left=queue.error.left_of(queue.num_steps),
        prefill_left=_least(machine.prefill_error, num_chunks) / machine.prefill_error.mean,
    )


def forecast_alone(machine: Machine, want: Want) -> Forecast:
    """The same with the whole machine to itself from now on, and no more output than it must give.

    The error of the prices is taken off.
    """
    return Forecast(
        queue_s=0.0,
        prefill_s=prefill_alone_s(machine, want),
        decode_s=_decode_alone_s(machine, want),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queue:
    """How long it is, in time and in steps, and how far off steps of its kind are."""

    seconds: float
    num_steps: float
    error: StepError


def _expected_queue(machine: Machine, want: Want, load: Load, ahead: Ahead) -> _Queue:
    """How long until the request is likely to be admitted.

    T = prefill tokens running and ahead, D = decodes, W = tokens they are expected to generate
    still. Departures come every W / D**2 steps, if outputs are memoryless (each of D ends within a
    step with probability D / W). Needed are k, so that slots and blocks suffice:

        k = max(ahead + 1 - free slots, (blocks ahead + own - free blocks) running / used blocks)
        n = max(T / B, k W / D**2) + half a step, the rest of the one that runs
        queue = n (step_s + D decode_slot_s + C context_token_s) + T prefill_token_s

    Departures beyond the first D are of those ahead, with their own mean output in place of W / D;
    where places are free, those ahead take them first and count among D.
    Those who still prefill count among D where departures are concerned: they come to decode. Zero
    when nobody runs and nobody is ahead.
    """
    num_tokens = load.num_prefill_tokens + ahead.num_prefill_tokens
    prefill_steps = num_tokens / _budget_tokens(machine, load)
    place_steps = _steps_until_place(want, load, ahead)
    num_steps = max(prefill_steps, place_steps)
    if load.num_running:
        num_steps += 0.5
    # Where places are what is scarce, those ahead have long filled the free ones.
    is_for_places = place_steps > prefill_steps
    beside_s = _beside_s(machine, _filled(load, ahead) if is_for_places else load)
    error = machine.decode_error if is_for_places else machine.prefill_error
    seconds = num_steps * beside_s + num_tokens * machine.prices.prefill_token_s
    return _Queue(seconds=error.mean * seconds, num_steps=num_steps, error=error)


def prefill_alone_s(machine: Machine, want: Want) -> float:
    """Least seconds from admission to the first token: no one else on the machine.

    With m = ceil(P / B) steps: m step_s + P prefill_token_s + context_token_s x (sum of the chunks'
    ends), less the error of the prices.
    """
    num_steps, num_context = _chunks(want, machine.max_prefill_tokens)
    prices = machine.prices
    return _least(machine.prefill_error, num_steps) * (
        num_steps * prices.step_s
        + want.num_prefill_tokens * prices.prefill_token_s
        + num_context * prices.context_token_s
    )


def hopeless_at_s(
    machine: Machine,
    want: Want,
    *,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
) -> float:
    """The moment from which on a waiting request cannot meet its deadlines, engine clock.

    min(ttft_timeout, deadline - decode alone) - prefill alone: even if it were admitted at once
    and had the machine to itself (`forecast_alone`). Holds while the prices do, so whoever waited
    until then asks again; NO_TIME when there is no deadline. Give NO_TIME for a time to first token
    that was met before a preemption.
    """
    latest_s = min(ttft_deadline_s, deadline_s - _decode_alone_s(machine, want))
    return latest_s - prefill_alone_s(machine, want)


def can_meet(
    outlook: Forecast,
    now: float,
    *,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
) -> bool:
    """Whether a forecast made now meets the deadlines (engine clock)."""
    return now + outlook.ttft_s < ttft_deadline_s and now + outlook.total_s < deadline_s


def retry_after_s(
    expected: Forecast,
    now: float,
    *,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
    min_s: float = 0.1,
    max_s: float = 60.0,
) -> float:
    """How long a refused client should wait, seconds: until the backlog has shrunk enough.

    `expected`: the `forecast` of the refused request. The same request with the same
    time to its deadlines would be likely to meet them once the queue is shorter by what it lacks
    now: max(now + ttft - ttft_timeout, now + total - deadline), but not by more than the whole
    queue. Without deadlines (the queue was full) the time until the head of the queue may move, a
    forecast for nobody ahead. Within `min_s` .. `max_s`; spread by the caller, who has randomness.
    """
    if ttft_deadline_s == NO_TIME and deadline_s == NO_TIME:
        lacking_s = expected.queue_s
    else:
        lacking_s = max(
            now + expected.ttft_s - ttft_deadline_s, now + expected.total_s - deadline_s
        )
    return min(max(min(lacking_s, expected.queue_s), min_s), max_s)


def _budget_tokens(machine: Machine, load: Load) -> int:
    if load.prefill_budget_tokens:
        return min(load.prefill_budget_tokens, machine.max_prefill_tokens)
    return machine.max_prefill_tokens


def _beside_s(machine: Machine, load: Load) -> float:
    """A step of those who run, before any prefill."""
    return machine.prices.step_time_s(
        num_prefill_tokens=0,
        num_decodes=load.num_decodes,
        num_context_tokens=load.num_context_tokens,
    )


def _filled(load: Load, ahead: Ahead) -> Load:
    """The load once those ahead have taken what places are free, each as long as its prompt."""
    num_joining = _num_joining(load, ahead)
    if not num_joining:
        return load
    num_context = ahead.num_prefill_tokens * num_joining // ahead.num_requests
    return replace(
        load,
        num_decodes=load.num_decodes + num_joining,
        num_context_tokens=load.num_context_tokens + num_context,
    )


def _num_joining(load: Load, ahead: Ahead) -> int:
    """How many of those ahead find a place without anybody leaving."""
    if not ahead.num_requests:
        return 0
    blocks_each = max(ahead.num_blocks / ahead.num_requests, 1.0)
    return min(load.num_free_slots, ahead.num_requests, int(load.num_free_blocks / blocks_each))


def _steps_until_place(want: Want, load: Load, ahead: Ahead) -> float:
    """Steps until enough requests have left for all ahead and this one."""
    blocks_each, steps_each = 1.0, 1.0
    if load.num_running:
        blocks_each = max(load.num_used_blocks / load.num_running, 1.0)
        steps_each = max(load.num_output_tokens / load.num_running, 1.0)
    steps_later = steps_each
    if ahead.num_requests:
        if not load.num_running:
            blocks_each = max(ahead.num_blocks / ahead.num_requests, 1.0)
        if ahead.num_output_tokens:
            steps_later = max(ahead.num_output_tokens / ahead.num_requests, 1.0)
    slots_short = ahead.num_requests + 1 - load.num_free_slots
    blocks_short = ahead.num_blocks + want.num_blocks - load.num_free_blocks
    num_departures = max(float(slots_short), blocks_short / blocks_each, 0.0)
    # First those who run leave, then those who came in their place.
    num_first = min(num_departures, float(load.num_running))
    num_later = num_departures - num_first
    num_beside = max(load.num_running + _num_joining(load, ahead), 1)
    return (num_first * steps_each + num_later * steps_later) / num_beside


def _chunks(want: Want, budget_tokens: int) -> tuple[int, int]:
    """Steps m that the prefill takes, and the least sum of the chunks' ends over them.

    The short chunk first, since a step that others have begun may have little room left: the ends
    are then P, P - B, P - 2 B, ..., and what is cached lies before each.
    """
    num_tokens = want.num_prefill_tokens
    num_steps = -(-num_tokens // budget_tokens)
    ends = num_steps * num_tokens - budget_tokens * (num_steps * (num_steps - 1) // 2)
    return num_steps, ends + num_steps * want.num_cached_tokens


def _expected_prefill_s(machine: Machine, want: Want, load: Load) -> float:
    prices = machine.prices
    num_steps, num_context = _chunks(want, _budget_tokens(machine, load))
    return machine.prefill_error.mean * (
        num_steps * _beside_s(machine, load)
        + want.num_prefill_tokens * prices.prefill_token_s
        + num_context * prices.context_token_s
    )


def _expected_decode_s(machine: Machine, want: Want, load: Load) -> float:
    num_own = want.num_prefill_tokens + want.num_cached_tokens + want.expected_output_tokens / 2.0
    own_s = machine.prices.decode_slot_s + num_own * machine.prices.context_token_s
    step_s = machine.decode_error.mean * (_beside_s(machine, load) + own_s)
    return max(want.expected_output_tokens - 1.0, 0.0) * step_s


def _decode_alone_s(machine: Machine, want: Want) -> float:
    num_context = want.num_prefill_tokens + want.num_cached_tokens
    step_s = machine.prices.step_time_s(
        num_prefill_tokens=0, num_decodes=1, num_context_tokens=num_context
    )
    num_steps = max(want.min_output_tokens - 1, 0)
    return _least(machine.decode_error, num_steps) * num_steps * step_s


def _least(error: StepError, num_steps: float) -> float:
    """What so many steps of the request itself take at least, of what the prices say.

    Nobody may be wronged: steps that took longer may have done so for the sake of others.
    """
    return min(error.mean, 1.0) * error.left_of(num_steps)
