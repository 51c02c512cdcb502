"""The arrival times and lengths of requests are determined by the seed, and are the same for any
number of processes.
"""

import itertools
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.bench.lengths import (
    FixedLength,
    LogNormalLength,
    UniformLength,
    lengths_text,
    parse_lengths,
)
from penstock.tools.bench.plan import Arrivals
from penstock.tools.bench.schedule import RandomPromptMaker, part_of, planned_requests, share_of
from support.load_events import plan


def row(arrival_s: float, num_prompt: int = 4, num_output: int = 2, **more: Any) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, num_prompt_tokens=num_prompt, num_output_tokens=num_output, **more
    )


def test_constant_arrivals_are_evenly_spaced_and_end_with_the_time() -> None:
    due = [request.at_s for request in planned_requests(plan(rate_per_s=4.0, duration_s=2.0))]

    assert due == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    many = plan(arrivals=Arrivals.POISSON, rate_per_s=50.0, duration_s=200.0, seed=3)
    due = [request.at_s for request in planned_requests(many)]
    gaps = [after - before for before, after in itertools.pairwise(due)]

    # 10,000 expected, with a deviation of 100; gaps vary as much as they are long.
    assert 9_500 < len(due) < 10_500
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
    assert due == sorted(due)


def test_a_seed_determines_the_load() -> None:
    def load(seed: int) -> list[Any]:
        lengths = UniformLength(min_tokens=1, max_tokens=50)
        made = plan(arrivals=Arrivals.POISSON, rate_per_s=10.0, seed=seed, prompt_tokens=lengths)
        return list(planned_requests(made))

    assert load(1) == load(1)
    assert load(1) != load(2)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_processes_together_send_exactly_the_schedule(num_workers: int) -> None:
    made = plan(arrivals=Arrivals.POISSON, rate_per_s=20.0, seed=5)
    whole = list(planned_requests(made))

    parts = [list(share_of(planned_requests(made), n, num_workers)) for n in range(num_workers)]

    assert sorted(itertools.chain(*parts), key=lambda request: request.index) == whole
    assert sum(part_of(100, n, num_workers) for n in range(num_workers)) == 100


def test_a_limit_of_requests_counts_those_after_the_warm_up() -> None:
    due = [r.at_s for r in planned_requests(plan(rate_per_s=2.0, warm_up_s=1.0, max_requests=3))]

    assert due == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_a_trace_is_replayed_at_its_own_times() -> None:
    rows = (row(0.0), row(0.4, 9, 7), row(20.0))
    replayed = list(planned_requests(plan(arrivals=Arrivals.REPLAY, rows=rows)))

    # The last one arrives after the run.
    assert [(r.at_s, r.row) for r in replayed] == [(0.0, rows[0]), (0.4, rows[1])]


def test_lengths_of_a_trace_are_used_in_turn_with_other_arrivals() -> None:
    rows = (row(0.0, 1), row(5.0, 2))
    lent = planned_requests(plan(rate_per_s=1.0, duration_s=3.0, rows=rows))
    endless = planned_requests(plan(arrivals=Arrivals.CLOSED, concurrency=2, rows=rows))

    assert [(r.at_s, r.row.num_prompt_tokens) for r in lent] == [(0.0, 1), (1.0, 2), (2.0, 1)]
    assert [r.row.num_prompt_tokens for r in itertools.islice(endless, 5)] == [1, 2, 1, 2, 1]


def test_prompts_are_exact_within_the_vocabulary_and_differ() -> None:
    made = plan(vocab_size=50, prompt_tokens=FixedLength(num_tokens=300))
    first, second = itertools.islice(planned_requests(made), 2)
    prompts = RandomPromptMaker(made)

    assert len(prompts.token_ids(first)) == 300
    assert set(prompts.token_ids(first)) <= set(range(50))
    assert prompts.token_ids(first) == prompts.token_ids(first)
    assert prompts.token_ids(first) != prompts.token_ids(second)
    # No run of a sweep may find the prompts of the one before it cached.
    assert prompts.token_ids(first) != RandomPromptMaker(replace(made, is_warm_up=True)).token_ids(
        first
    )
    assert prompts.token_ids(first) != RandomPromptMaker(replace(made, run_index=1)).token_ids(
        first
    )


def test_prompts_share_what_their_trace_specifies() -> None:
    rows = tuple(
        row(0.0, 10, prefix_ids=ids, prefix_block_tokens=4, tenant=tenant)
        for ids, tenant in (((1, 2, 3), ""), ((1, 2, 9), ""), ((1, 2, 3), "other"))
    )
    made = plan(arrivals=Arrivals.REPLAY, rows=rows, tenant_metadata_key="tenant")
    prompts = RandomPromptMaker(made)
    one, two, other = (prompts.token_ids(request) for request in planned_requests(made))

    assert (len(one), len(two)) == (10, 10)
    assert one[:8] == two[:8]
    assert one[8:] != two[8:]
    assert other[:4] != one[:4]


@pytest.mark.parametrize("text", ["128", "uniform:1:64", "lognormal:100:0.5:4096"])
def test_lengths_are_written_as_they_are_read(text: str) -> None:
    assert lengths_text(parse_lengths(text)) == text


def test_lengths_keep_to_their_distribution() -> None:
    chance = random.Random(1)
    uniform = [UniformLength(min_tokens=2, max_tokens=4).draw(chance) for _ in range(300)]
    lognormal = LogNormalLength(mean_tokens=100.0, sigma=0.5, max_tokens=400)
    drawn = [lognormal.draw(chance) for _ in range(4000)]

    assert set(uniform) == {2, 3, 4}
    assert min(drawn) >= 1
    assert max(drawn) <= 400
    assert statistics.mean(drawn) == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be N, uniform:MIN:MAX or"),
        ("1.5", "must be N, uniform:MIN:MAX or"),
        ("normal:1:2", "must be N, uniform:MIN:MAX or"),
        ("uniform:1", "must be N, uniform:MIN:MAX or"),
        ("0", "num_tokens must be in 1 .."),
        ("uniform:5:4", "min_tokens must be at most max_tokens"),
        ("lognormal:10:11:20", "sigma must be in 0 .. 10"),
        ("lognormal:30:1:20", "mean_tokens must be in 1 .. max_tokens"),
    ],
)
def test_bad_lengths_are_reported(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"arrivals": Arrivals.POISSON}, "rate_per_s"),
        ({"arrivals": Arrivals.CLOSED}, "concurrency"),
        ({"arrivals": Arrivals.REPLAY}, "rows"),
        ({"duration_s": 0.0}, "duration_s"),
        ({"duration_s": 1e9}, "warm_up_s"),
        ({"warm_up_s": -1.0}, "warm_up_s"),
        ({"drain_s": float("nan")}, "drain_s"),
        ({"max_requests": 0}, "max_requests"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"tenant": "a"}, "tenant_metadata_key"),
    ],
)
def test_a_bad_plan_names_its_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        plan(**settings)
