"""Generates the requests of a run in order, each with its due time, lengths and prompt.

Deterministic: depends only on the plan. Every process generates the whole schedule and takes its
share, so that the same requests are sent with any number of processes.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.bench.plan import Arrivals, LoadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """Request number `index` (from 0) of a run, due `at_s` seconds after the run's start.

    `at_s` is 0 in a closed loop, where a request is due when another has ended. `row`: lengths,
    tenant and other fields of the request; its `arrival_s` is not used.
    """

    index: int
    at_s: float
    row: TraceRequest


def planned_requests(plan: LoadPlan) -> Iterator[PlannedRequest]:
    """Yield the requests of a run, in order of `at_s`.

    Open loop: the requests due before `plan.end_s`, but at most `plan.max_requests` due after the
    warm-up. Closed loop: an infinite sequence; the sender decides when to stop.
    """
    rows = _rows(plan)
    if not plan.is_open_loop:
        for index, row in enumerate(rows):
            yield PlannedRequest(index=index, at_s=0.0, row=row)
        return
    num_counted = 0
    for index, (at_s, row) in enumerate(zip(_arrivals(plan), rows, strict=False)):
        if at_s >= plan.end_s or num_counted == plan.max_requests:
            return
        num_counted += at_s >= plan.warm_up_s
        yield PlannedRequest(index=index, at_s=at_s, row=row)


def share_of(
    requests: Iterator[PlannedRequest], worker: int, num_workers: int
) -> Iterator[PlannedRequest]:
    """Return the requests of process `worker`: every `num_workers`-th, beginning with number
    `worker`.
    """
    return itertools.islice(requests, worker, None, num_workers)


def part_of(total: int, worker: int, num_workers: int) -> int:
    """Return the part of process `worker` when `total` is divided evenly among `num_workers`
    processes.
    """
    return total // num_workers + (worker < total % num_workers)


class RandomPromptMaker:
    """Generates prompts: random token ids below the vocabulary size, in the number that the request
    specifies.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._seed = f"{plan.seed}:{plan.run_index}{':warm-up' if plan.is_warm_up else ''}"
        self._vocabulary = range(plan.vocab_size)

    def token_ids(self, request: PlannedRequest) -> list[int]:
        """Return the prompt's token ids. Prompt parts with the same prefix id and tenant are the
        same.
        """
        row = request.row
        if not row.prefix_ids:
            return self._draw(str(request.index), row.num_prompt_tokens)
        ids: list[int] = []
        for prefix_id in row.prefix_ids:
            ids += self._draw(f"{row.tenant}:prefix {prefix_id}", row.prefix_block_tokens)
        return ids[: row.num_prompt_tokens]

    def _draw(self, what: str, num_tokens: int) -> list[int]:
        # A string seed is hashed as a whole, so adjacent requests have unrelated prompts.
        return random.Random(f"{self._seed}:{what}").choices(self._vocabulary, k=num_tokens)


def _arrivals(plan: LoadPlan) -> Iterator[float]:
    rate_per_s = plan.rate_per_s or 0.0
    match plan.arrivals:
        case Arrivals.CONSTANT:
            return (index / rate_per_s for index in itertools.count())
        case Arrivals.REPLAY:
            return (row.arrival_s for row in plan.rows)
        case _:
            rng = random.Random(f"{plan.seed}:arrivals")
            return itertools.accumulate(rng.expovariate(rate_per_s) for _ in itertools.count())


def _rows(plan: LoadPlan) -> Iterator[TraceRequest]:
    if plan.arrivals is Arrivals.REPLAY:
        return iter(plan.rows)
    if plan.rows:
        return itertools.cycle(plan.rows)
    return _drawn_rows(plan)


def _drawn_rows(plan: LoadPlan) -> Iterator[TraceRequest]:
    rng = random.Random(f"{plan.seed}:lengths")
    while True:
        yield TraceRequest(
            arrival_s=0.0,
            num_prompt_tokens=plan.prompt_tokens.draw(rng),
            num_output_tokens=plan.output_tokens.draw(rng),
        )
