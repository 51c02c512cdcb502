"""Predicts when a request will get its first and its last token, before it runs.

Owns the formulas, and which deadlines of a request are open. Pure functions of the cost model, the
machine's limits, the running requests and the requests ahead; does not know the queue, its order,
or how a rejection is reported.

It is a fluid model: work is conserved, all requests ahead go first, and they need a number of steps
n and a number of prefill tokens T, so that they take

    n (cost of a step with the decodes next to it) + T prefill_token_s.

n is set by whichever is scarcer, the prefill budget or slots and blocks: max(T / budget, departures
needed x steps between departures) (the bottleneck law of operational analysis: Lazowska et al.,
*Quantitative System Performance*, chapter 5).

Two forecasts, and their purposes:

- `forecast`: running requests keep their rate and leave at the rate of the mean output length.
  RetryInfo and estimates for clients use this one.
- `forecast_alone`: no request is ahead and none runs. A lower bound that holds whatever is
  cancelled, ends or is overtaken, as long as the cost model holds; `hopeless_at_s` uses it.
"""

from dataclasses import dataclass, replace

from penstock.scheduler.cost_model import EXACT, StepCost, StepError
from penstock.scheduler.request import NO_TIME, FailureReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine's limits and costs.

    `prices`: cost model of a step, fitted or fixed. `max_prefill_tokens`: the token budget of a
    step. `prefill_error`, `decode_error`: the error of the cost model for steps with prefill and
    without. ValueError names the invalid field.
    """

    prices: StepCost
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
    """The running requests, in sums; all zero if there are none.

    `num_running`: requests with a slot, `num_decodes` of them past their prefill.
    `num_context_tokens`: sum over the running requests. `num_prefill_tokens`: tokens that the
    requests in prefill must still compute. `num_output_tokens`: tokens that all running requests
    are expected to generate (see `output_lengths.py`). `num_used_blocks`; `num_free_blocks` and
    `num_free_slots`: as many as admission may take. `prefill_budget_tokens`: the present prefill
    budget of a step, 0 for the whole of the machine's budget.
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
class QueuedAhead:
    """The waiting requests ahead, in sums that a queue can maintain.

    `num_prefill_tokens`: tokens they have to compute, without known cached prefixes. `num_blocks`:
    blocks that their admission takes. `num_output_tokens`: tokens they are expected to generate, 0
    for the mean of the running requests.
    """

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_blocks: int = 0
    num_output_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of the request itself.

    `num_prefill_tokens`: tokens to compute before its first token, at least 1. To decide on a
    refusal, pass the lower bound: a prefix that may be computed by then counts as found.
    `num_cached_tokens`: cached context. `num_blocks`: blocks that its admission takes.
    `min_output_tokens`: it cannot end with fewer; `expected_output_tokens`: see
    `output_lengths.py`. ValueError names the invalid field.
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
    """Seconds from now, one phase after the other.

    `queue_left`, `prefill_left`: the share of each that remains after subtracting the cost model's
    error.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    queue_left: float = 1.0
    prefill_left: float = 1.0

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token."""
        return self.queue_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """Seconds until the last token."""
        return self.queue_s + self.prefill_s + self.decode_s


def forecast(machine: Machine, demand: Demand, load: Load, ahead: QueuedAhead) -> Forecast:
    """Return the expected times of a request that joins now.

    With P = `demand.num_prefill_tokens`, B the prefill budget and t the cost of a step next to the
    running decodes:

        prefill = ceil(P / B) t + P prefill_token_s + context of the chunks

        decode = (expected output - 1) (t with one decode more)
    """
    queue = _expected_queue(machine, demand, load, ahead)
    num_chunks, _ = _chunks(demand, _budget_tokens(machine, load))
    return Forecast(
        queue_s=queue.seconds,
        prefill_s=_expected_prefill_s(machine, demand, load),
        decode_s=_expected_decode_s(machine, demand, load),
        queue_left=queue.error.left_of(queue.num_steps),
        prefill_left=_least(machine.prefill_error, num_chunks) / machine.prefill_error.mean,
    )


def forecast_alone(machine: Machine, demand: Demand) -> Forecast:
    """Return the forecast of the request alone on the machine from now on, with its minimum output.

    The error of the cost model is subtracted.
    """
    return Forecast(
        queue_s=0.0,
        prefill_s=prefill_alone_s(machine, demand),
        decode_s=_decode_alone_s(machine, demand),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queue:
    """The queue's length in time and in steps, and the error for steps of its kind."""

    seconds: float
    num_steps: float
    error: StepError


def _expected_queue(machine: Machine, demand: Demand, load: Load, ahead: QueuedAhead) -> _Queue:
    """Return the expected time until the request is admitted.

    T = prefill tokens running and ahead, D = decodes, W = tokens that they are still expected to
    generate. Departures come every W / D**2 steps, if outputs are memoryless (each of D ends within
    a step with probability D / W). k departures are needed, so that slots and blocks suffice:

        k = max(ahead + 1 - free slots, (blocks ahead + own - free blocks) running / used blocks)

        n = max(T / B, k W / D**2) + half a step, the rest of the one that runs

        queue = n (step_s + D decode_slot_s + C context_token_s) + T prefill_token_s

    Departures beyond the first D are those of requests ahead, with their own mean output in place
    of W / D; where slots are free, requests ahead take them first and count in D. For departures, D
    includes requests in prefill, which will decode. Zero if no request runs or is ahead.
    """
    num_tokens = load.num_prefill_tokens + ahead.num_prefill_tokens
    prefill_steps = num_tokens / _budget_tokens(machine, load)
    place_steps = _steps_until_place(demand, load, ahead)
    num_steps = max(prefill_steps, place_steps)
    if load.num_running:
        num_steps += 0.5
    # Where slots or blocks are scarce, requests ahead have filled the free ones by then.
    is_for_places = place_steps > prefill_steps
    beside_s = _beside_s(machine, _filled(load, ahead) if is_for_places else load)
    error = machine.decode_error if is_for_places else machine.prefill_error
    seconds = num_steps * beside_s + num_tokens * machine.prices.prefill_token_s
    return _Queue(seconds=error.mean * seconds, num_steps=num_steps, error=error)


def prefill_alone_s(machine: Machine, demand: Demand) -> float:
    """Return the minimum seconds from admission to the first token, alone on the machine.

    With m = ceil(P / B) steps: m step_s + P prefill_token_s + context_token_s x (sum of the chunks'
    ends), less the error of the cost model.
    """
    num_steps, num_context = _chunks(demand, machine.max_prefill_tokens)
    prices = machine.prices
    return _least(machine.prefill_error, num_steps) * (
        num_steps * prices.step_s
        + demand.num_prefill_tokens * prices.prefill_token_s
        + num_context * prices.context_token_s
    )


def hopeless_at_s(
    machine: Machine,
    demand: Demand,
    *,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
) -> float:
    """Return the time from which a waiting request cannot meet its deadlines, engine clock.

    min(ttft_timeout, deadline - decode alone) - prefill alone: even if it were admitted at once and
    had the machine to itself (`forecast_alone`). Valid while the cost model is, so check again at
    that time; NO_TIME if there is no deadline. Pass NO_TIME for a TTFT deadline that was met before
    a preemption.
    """
    latest_s = min(ttft_deadline_s, deadline_s - _decode_alone_s(machine, demand))
    return latest_s - prefill_alone_s(machine, demand)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The deadlines for the first token, until it is sent, and for the complete output; engine
    clock.
    """

    ttft_s: float
    total_s: float

    @property
    def earliest_s(self) -> float:
        """The earlier of the two."""
        return min(self.ttft_s, self.total_s)

    @property
    def is_any(self) -> bool:
        """Whether there is a deadline at all."""
        return self.earliest_s != NO_TIME

    def are_met(self, predicted: Forecast, now: float) -> bool:
        """Whether a forecast made now meets both."""
        return now + predicted.ttft_s < self.ttft_s and now + predicted.total_s < self.total_s

    def passed_by(self, now: float) -> FailureReason:
        """Return the failure reason of the deadline that has passed."""
        if self.total_s <= now:
            return FailureReason.DEADLINE_EXCEEDED
        return FailureReason.TTFT_DEADLINE_EXCEEDED


def deadlines_of(request: Request) -> Deadlines:
    """Return the open deadlines; a first token sent before a preemption has met its deadline."""
    spec = request.spec
    is_first_due = request.first_token_s == NO_TIME
    return Deadlines(
        ttft_s=spec.ttft_deadline_s if is_first_due else NO_TIME, total_s=spec.deadline_s
    )


def retry_after_s(
    expected: Forecast,
    now: float,
    *,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
    min_s: float = 0.1,
    max_s: float = 60.0,
) -> float:
    """Return how many seconds a refused client should wait: until the backlog has shrunk enough.

    `expected`: the `forecast` of the refused request. The same request with the same time to its
    deadlines would be likely to meet them once the queue is shorter by its present shortfall:
    max(now + ttft - ttft_timeout, now + total - deadline), but not by more than the whole queue.
    Without deadlines (the queue was full): the time until the head of the queue may move, from a
    forecast with no request ahead. Within `min_s` .. `max_s`; the caller adds the jitter.
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
    """Return the seconds of a step of the running requests, without prefill."""
    return machine.prices.step_time_s(
        num_prefill_tokens=0,
        num_decodes=load.num_decodes,
        num_context_tokens=load.num_context_tokens,
    )


def _filled(load: Load, ahead: QueuedAhead) -> Load:
    """Return the load after requests ahead took the free slots, each as long as its prompt."""
    num_joining = _num_joining(load, ahead)
    if not num_joining:
        return load
    num_context = ahead.num_prefill_tokens * num_joining // ahead.num_requests
    return replace(
        load,
        num_decodes=load.num_decodes + num_joining,
        num_context_tokens=load.num_context_tokens + num_context,
    )


def _num_joining(load: Load, ahead: QueuedAhead) -> int:
    """Return how many requests ahead are admitted without a departure."""
    if not ahead.num_requests:
        return 0
    blocks_each = max(ahead.num_blocks / ahead.num_requests, 1.0)
    return min(load.num_free_slots, ahead.num_requests, int(load.num_free_blocks / blocks_each))


def _steps_until_place(demand: Demand, load: Load, ahead: QueuedAhead) -> float:
    """Return the steps until enough requests have ended for all ahead and this one."""
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
    blocks_short = ahead.num_blocks + demand.num_blocks - load.num_free_blocks
    num_departures = max(float(slots_short), blocks_short / blocks_each, 0.0)
    # First the running requests leave, then those that replaced them.
    num_first = min(num_departures, float(load.num_running))
    num_later = num_departures - num_first
    num_beside = max(load.num_running + _num_joining(load, ahead), 1)
    return (num_first * steps_each + num_later * steps_later) / num_beside


def _chunks(demand: Demand, budget_tokens: int) -> tuple[int, int]:
    """Return the steps m that the prefill takes, and the minimum sum of the chunks' ends.

    The short chunk comes first, since a step in progress may have little room left: the ends are
    then P, P - B, P - 2 B, ..., and the cached part precedes each.
    """
    num_tokens = demand.num_prefill_tokens
    num_steps = -(-num_tokens // budget_tokens)
    ends = num_steps * num_tokens - budget_tokens * (num_steps * (num_steps - 1) // 2)
    return num_steps, ends + num_steps * demand.num_cached_tokens


def _expected_prefill_s(machine: Machine, demand: Demand, load: Load) -> float:
    prices = machine.prices
    num_steps, num_context = _chunks(demand, _budget_tokens(machine, load))
    return machine.prefill_error.mean * (
        num_steps * _beside_s(machine, load)
        + demand.num_prefill_tokens * prices.prefill_token_s
        + num_context * prices.context_token_s
    )


def _expected_decode_s(machine: Machine, demand: Demand, load: Load) -> float:
    num_own = (
        demand.num_prefill_tokens + demand.num_cached_tokens + demand.expected_output_tokens / 2.0
    )
    own_s = machine.prices.decode_slot_s + num_own * machine.prices.context_token_s
    step_s = machine.decode_error.mean * (_beside_s(machine, load) + own_s)
    return max(demand.expected_output_tokens - 1.0, 0.0) * step_s


def _decode_alone_s(machine: Machine, demand: Demand) -> float:
    num_context = demand.num_prefill_tokens + demand.num_cached_tokens
    step_s = machine.prices.step_time_s(
        num_prefill_tokens=0, num_decodes=1, num_context_tokens=num_context
    )
    num_steps = max(demand.min_output_tokens - 1, 0)
    return _least(machine.decode_error, num_steps) * num_steps * step_s


def _least(error: StepError, num_steps: float) -> float:
    """Return the minimum of actual over predicted time for `num_steps` steps of the request itself.

    It must not overestimate: steps that took longer may have done so because of other requests.
    """
    return min(error.mean, 1.0) * error.left_of(num_steps)
