"""Predicts when a request will get its first and its last token, before it runs.

Contains pure functions of the cost model, the machine's limits, the running requests and the
requests ahead; they do not read the queue. Also defines which deadlines of a request are still
open.

The forecast is a fluid model: the machine is never idle while requests wait, and all requests ahead
go first. Their n steps and T prefill tokens take

    n x (cost of a step with the running decodes) + T x prefill_token_s.

n is limited by the prefill budget or by slots and blocks: max(T / budget, departures needed x steps
between departures) (the bottleneck law of operational analysis: Lazowska et al., *Quantitative
System Performance*, chapter 5).

There are two forecasts:

- `forecast`: running requests keep their token rate and end at the rate that follows from the mean
  output length. Used for rejections, for RetryInfo and for estimates reported to clients.
- `forecast_alone`: no request is ahead, none runs, and the output is short
  (`Demand.min_output_tokens`). These times stay lower bounds when other requests end, are cancelled
  or are overtaken, as long as the cost model is valid. `latest_admission_s` uses the same times.
"""

from dataclasses import dataclass, replace

from penstock.scheduler.cost_model import EXACT, StepCost, StepError
from penstock.scheduler.request import NO_TIME, FailureReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineModel:
    """The machine's limits and costs.

    `cost`: cost model of a step, fitted or fixed. `max_prefill_tokens`: the prefill budget of a
    step. `prefill_error`, `decode_error`: the error of the cost model for steps with prefill and
    without. Raises ValueError naming the invalid field.
    """

    cost: StepCost
    max_prefill_tokens: int
    prefill_error: StepError = EXACT
    decode_error: StepError = EXACT

    def __post_init__(self) -> None:
        if self.max_prefill_tokens < 1:
            raise ValueError(
                f"max_prefill_tokens must be at least 1, not {self.max_prefill_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLoad:
    """The running requests, as sums, and the resources that they leave free.

    Attributes:
        num_running, num_decodes: Number of requests with a slot, and of requests past their
            prefill.
        num_context_tokens: Context tokens of all running requests.
        num_prefill_tokens: Tokens that the requests in prefill must still compute.
        num_output_tokens: Tokens that all running requests are still expected to generate (see
            `output_lengths.py`).
        num_free_blocks, num_free_slots: Blocks and slots that admission may take.
        prefill_budget_tokens: The current prefill budget of a step, 0 for the machine's full
            budget.
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
    """Sums over the waiting requests ahead.

    `num_prefill_tokens`: tokens to compute, without the prefixes that were cached when the requests
    joined the queue. `num_blocks`: blocks that their admission takes. `num_output_tokens`: tokens
    that they are expected to generate; 0: use the mean of the running requests.
    """

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_blocks: int = 0
    num_output_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The resources that one request needs, as input of a forecast.

    Raises ValueError naming the invalid field.

    Attributes:
        num_prefill_tokens: Tokens to compute before the request's next token, at least 1; too many
            if another request computes part of the prefix meanwhile.
        num_cached_tokens: Prompt tokens found in the cache.
        num_blocks: Blocks that its admission takes.
        min_output_tokens: The number of tokens still to generate if the output is short. With a
            deadline for the complete output, this is a low quantile: the number within which the
            request ends with the minimum probability required
            (`CompletionPredictor.min_further_tokens`). Otherwise it is the minimum of the request.
        expected_output_tokens: The expected number of tokens still to generate (see
            `output_lengths.py`).
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
    """The predicted durations of queue, prefill and decode, in seconds.

    `queue_left`, `prefill_left`: the fraction of the duration that remains after subtracting the
    cost model's error.
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


def forecast(
    machine: MachineModel, demand: Demand, load: RunningLoad, ahead: QueuedAhead
) -> Forecast:
    """Return the expected times of a request that joins the queue now.

    With P = `demand.num_prefill_tokens`, B the prefill budget, t the cost of a step with the
    running decodes, and S the sum of the context lengths at the ends of the request's prefill
    chunks:

        prefill = ceil(P / B) t + P prefill_token_s + S context_token_s

        decode = (expected output - 1) x (t with one more decode)

    Both are multiplied by the mean ratio of measured to predicted step time (`StepError.mean`). The
    queue time is computed by `_expected_queue`.
    """
    queue = _expected_queue(machine, demand, load, ahead)
    num_chunks, _ = _chunks(demand, _budget_tokens(machine, load))
    return Forecast(
        queue_s=queue.seconds,
        prefill_s=_expected_prefill_s(machine, demand, load),
        decode_s=_expected_decode_s(machine, demand, load),
        queue_left=queue.error.remaining_share(queue.num_steps),
        prefill_left=_lower_bound(machine.prefill_error, num_chunks) / machine.prefill_error.mean,
    )


def forecast_alone(machine: MachineModel, demand: Demand) -> Forecast:
    """Return the forecast for an otherwise idle machine and an output of `min_output_tokens`.

    Times are reduced by the cost model's error.
    """
    return Forecast(
        queue_s=0.0,
        prefill_s=prefill_alone_s(machine, demand),
        decode_s=_decode_alone_s(machine, demand),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueueTime:
    """The expected queue time, in seconds and in steps, and the prediction error of these steps."""

    seconds: float
    num_steps: float
    error: StepError


def _expected_queue(
    machine: MachineModel, demand: Demand, load: RunningLoad, ahead: QueuedAhead
) -> _QueueTime:
    """Return the expected time until the request is admitted.

    Let T be the prefill tokens running and ahead, D the number of decodes, C the context tokens of
    the running requests, and W the tokens that the decodes are still expected to generate. A
    request departs every W / D**2 steps, if outputs are memoryless (each of the D decodes ends
    within a step with probability D / W). k departures are needed until slots and blocks suffice,
    and the request waits for n steps:

        k = max(ahead + 1 - free slots, (blocks ahead + own - free blocks) running / used blocks)

        n = max(T / B, k W / D**2) + half a step for the current one

        queue = n (step_s + D decode_slot_s + C context_token_s) + T prefill_token_s

    The queue time is multiplied by `StepError.mean`. After the first D departures, requests ahead
    depart, with their own mean output length instead of W / D. If slots are free, requests ahead
    take them first and count in D. For departures, D includes requests in prefill. Zero if no
    request runs or is ahead.
    """
    num_tokens = load.num_prefill_tokens + ahead.num_prefill_tokens
    prefill_steps = num_tokens / _budget_tokens(machine, load)
    admission_steps = _steps_until_slot(demand, load, ahead)
    num_steps = max(prefill_steps, admission_steps)
    if load.num_running:
        num_steps += 0.5
    # Where slots or blocks are scarce, requests ahead have filled the free ones by then.
    waits_for_departures = admission_steps > prefill_steps
    decode_step_s = _decode_step_s(machine, _filled(load, ahead) if waits_for_departures else load)
    error = machine.decode_error if waits_for_departures else machine.prefill_error
    seconds = num_steps * decode_step_s + num_tokens * machine.cost.prefill_token_s
    return _QueueTime(seconds=error.mean * seconds, num_steps=num_steps, error=error)


def prefill_alone_s(machine: MachineModel, demand: Demand) -> float:
    """Return the minimum seconds from admission to the first token, alone on the machine.

    With P = `demand.num_prefill_tokens`, B = `machine.max_prefill_tokens` and m = ceil(P / B)
    steps: m step_s + P prefill_token_s + context_token_s x (sum of the context lengths at the
    chunks' ends), times the lower bound of the ratio of actual to predicted time (`_lower_bound`).
    """
    num_steps, num_context = _chunks(demand, machine.max_prefill_tokens)
    cost = machine.cost
    return _lower_bound(machine.prefill_error, num_steps) * (
        num_steps * cost.step_s
        + demand.num_prefill_tokens * cost.prefill_token_s
        + num_context * cost.context_token_s
    )


def latest_admission_s(
    machine: MachineModel,
    demand: Demand,
    *,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
) -> float:
    """Return the latest time, on the engine clock, at which a waiting request can be admitted and
    still meet its deadlines.

    min(TTFT deadline, deadline - decode alone) - prefill alone, with the times of `forecast_alone`.
    The cost model may change until then, so check again at that time. NO_TIME if there is no
    deadline. Pass NO_TIME for a TTFT deadline that was met before a preemption.
    """
    latest_s = min(ttft_deadline_s, deadline_s - _decode_alone_s(machine, demand))
    return latest_s - prefill_alone_s(machine, demand)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The deadlines of a request that are still open, seconds on the engine's clock; NO_TIME for
    none.

    `ttft_s`: for the first token. `total_s`: for the complete output.
    """

    ttft_s: float
    total_s: float

    @property
    def earliest_s(self) -> float:
        """The earlier of the two deadlines, on the engine clock."""
        return min(self.ttft_s, self.total_s)

    @property
    def is_any(self) -> bool:
        """Whether there is any deadline."""
        return self.earliest_s != NO_TIME

    def are_met(self, predicted: Forecast, now: float) -> bool:
        """Return whether a forecast made now meets both deadlines."""
        return now + predicted.ttft_s < self.ttft_s and now + predicted.total_s < self.total_s

    def exceeded_reason(self, now: float) -> FailureReason:
        """Return DEADLINE_EXCEEDED if the deadline of the complete output has passed, else
        TTFT_DEADLINE_EXCEEDED. Call it only if one of the two has passed.
        """
        if self.total_s <= now:
            return FailureReason.DEADLINE_EXCEEDED
        return FailureReason.TTFT_DEADLINE_EXCEEDED


def deadlines_of(request: Request) -> Deadlines:
    """Return the open deadlines of a request. After its first token, even if it was preempted
    since, only the deadline of the complete output is open.
    """
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
    """Return the retry delay, in seconds, for a rejected request: until the backlog has shrunk
    enough.

    `expected`: the `forecast` of the rejected request. The same request, sent again with the same
    timeouts, is likely to succeed once the queue time has fallen by the present excess: max(now +
    TTFT - TTFT deadline, now + total - deadline), at most the queue time. Without deadlines: the
    queue time. Within `min_s` .. `max_s`; the caller adds the jitter.
    """
    if ttft_deadline_s == NO_TIME and deadline_s == NO_TIME:
        excess_s = expected.queue_s
    else:
        excess_s = max(now + expected.ttft_s - ttft_deadline_s, now + expected.total_s - deadline_s)
    return min(max(min(excess_s, expected.queue_s), min_s), max_s)


def _budget_tokens(machine: MachineModel, load: RunningLoad) -> int:
    if load.prefill_budget_tokens:
        return min(load.prefill_budget_tokens, machine.max_prefill_tokens)
    return machine.max_prefill_tokens


def _decode_step_s(machine: MachineModel, load: RunningLoad) -> float:
    """Return the seconds of a step with the running decodes and without prefill."""
    return machine.cost.step_time_s(
        num_prefill_tokens=0,
        num_decodes=load.num_decodes,
        num_context_tokens=load.num_context_tokens,
    )


def _filled(load: RunningLoad, ahead: QueuedAhead) -> RunningLoad:
    """Return the load after as many of the requests ahead as fit have been admitted. Each adds one
    decode, and the mean number of prompt tokens still to compute as context.
    """
    num_joining = _num_joining(load, ahead)
    if not num_joining:
        return load
    num_context = ahead.num_prefill_tokens * num_joining // ahead.num_requests
    return replace(
        load,
        num_decodes=load.num_decodes + num_joining,
        num_context_tokens=load.num_context_tokens + num_context,
    )


def _num_joining(load: RunningLoad, ahead: QueuedAhead) -> int:
    """Return how many requests ahead can be admitted before any running request ends."""
    if not ahead.num_requests:
        return 0
    blocks_each = max(ahead.num_blocks / ahead.num_requests, 1.0)
    return min(load.num_free_slots, ahead.num_requests, int(load.num_free_blocks / blocks_each))


def _steps_until_slot(demand: Demand, load: RunningLoad, ahead: QueuedAhead) -> float:
    """Return the number of steps until all requests ahead and this one have slots and blocks."""
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
    num_concurrent = max(load.num_running + _num_joining(load, ahead), 1)
    return (num_first * steps_each + num_later * steps_later) / num_concurrent


def _chunks(demand: Demand, budget_tokens: int) -> tuple[int, int]:
    """Return the number of prefill steps, and the minimum sum of the context lengths at the ends of
    their chunks.

    With P tokens to prefill and a budget of B per step, the short chunk comes first, since a step
    in progress may have little budget left. The chunks end, last one first, after P, P - B,
    P - 2 B, ... of these tokens; the cached tokens are added to each end.
    """
    num_tokens = demand.num_prefill_tokens
    num_steps = -(-num_tokens // budget_tokens)
    ends = num_steps * num_tokens - budget_tokens * (num_steps * (num_steps - 1) // 2)
    return num_steps, ends + num_steps * demand.num_cached_tokens


def _expected_prefill_s(machine: MachineModel, demand: Demand, load: RunningLoad) -> float:
    cost = machine.cost
    num_steps, num_context = _chunks(demand, _budget_tokens(machine, load))
    return machine.prefill_error.mean * (
        num_steps * _decode_step_s(machine, load)
        + demand.num_prefill_tokens * cost.prefill_token_s
        + num_context * cost.context_token_s
    )


def _expected_decode_s(machine: MachineModel, demand: Demand, load: RunningLoad) -> float:
    num_own = (
        demand.num_prefill_tokens + demand.num_cached_tokens + demand.expected_output_tokens / 2.0
    )
    own_s = machine.cost.decode_slot_s + num_own * machine.cost.context_token_s
    step_s = machine.decode_error.mean * (_decode_step_s(machine, load) + own_s)
    return max(demand.expected_output_tokens - 1.0, 0.0) * step_s


def _decode_alone_s(machine: MachineModel, demand: Demand) -> float:
    num_context = demand.num_prefill_tokens + demand.num_cached_tokens
    step_s = machine.cost.step_time_s(
        num_prefill_tokens=0, num_decodes=1, num_context_tokens=num_context
    )
    num_steps = max(demand.min_output_tokens - 1, 0)
    return _lower_bound(machine.decode_error, num_steps) * num_steps * step_s


def _lower_bound(error: StepError, num_steps: float) -> float:
    """Return the lower bound of the ratio of actual to predicted time for `num_steps` steps of a
    request.

    The mean ratio counts as at most 1, because other requests may have made past steps slow.
    """
    return min(error.mean, 1.0) * error.remaining_share(num_steps)
