"""A simulated run has the times that were computed by hand, counts each request once, and is
reproducible. The tests also cover batching policies and prefixes.
"""

import csv
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimal_cache import optimal_hit_rate
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.report import (
    PAGE_FILE,
    REQUESTS_FILE,
    SUMMARY_FILE,
    summary_lines,
    write_report,
)
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.simulation.simulate import SimulationRun, simulate
from penstock.tools.simulation.summary import summarise
from penstock.tools.simulation.synthetic import SyntheticConfig, TenantShare, synthetic_trace
from penstock.tools.targets import Targets

# One second a step, a tenth for each prefill token: everything below can be added up by hand.
COST = CostModel(step_s=1.0, prefill_token_s=0.1, decode_slot_s=0.0, context_token_s=0.0)
BASE = SimulationConfig(
    policy=BatchingPolicy.FCFS,
    cost=COST,
    targets=Targets(ttft_s=3.0, itl_s=2.5),
    max_num_seqs=4,
    num_blocks=64,
    block_size=4,
    max_seq_len=128,
    sample_every_steps=1,
    timeline_bin_s=5.0,
)


def request(arrival_s: float, num_prompt: int, num_output: int, **fields: Any) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, num_prompt_tokens=num_prompt, num_output_tokens=num_output, **fields
    )


def column(run: SimulationRun, name: str) -> list[float]:
    return [round(value, 9) for value in run.recorder.table.seconds(name).tolist()]


THREE = [request(0.0, 10, 3), request(0.5, 20, 2), request(30.0, 5, 1)]


def test_time_outside_the_engine_is_only_part_of_ttft_and_the_total() -> None:
    plain, fronted = (
        summarise(simulate(THREE, dataclasses.replace(BASE, front_s=front_s)))
        for front_s in (0.0, 0.25)
    )

    assert fronted.ttft.mean_s == pytest.approx(plain.ttft.mean_s + 0.25)
    assert fronted.total.mean_s == pytest.approx(plain.total.mean_s + 0.25)
    assert (fronted.queue, fronted.itl) == (plain.queue, plain.itl)
    with pytest.raises(ValueError, match="front_s must be at least 0"):
        dataclasses.replace(BASE, front_s=-1.0)


def test_three_requests_by_hand() -> None:
    run = simulate(THREE, BASE)

    # Step 1 (0 to 2): prefill of 10. Step 2 (2 to 5): one decode, prefill of 20, which arrived
    # meanwhile. Step 3 (5 to 6): both decode and end. Idle to 30; step 4 (30 to 31.5).
    assert column(run, "admitted_s") == [0.0, 2.0, 30.0]
    assert column(run, "first_token_s") == [2.0, 5.0, 31.5]
    assert column(run, "end_s") == [6.0, 6.0, 31.5]
    assert column(run, "max_gap_s") == [3.0, 1.0, 0.0]
    assert run.recorder.table.counts("num_output_tokens").tolist() == [3, 2, 1]
    assert run.recorder.table.counts("num_slow_gaps").tolist() == [1, 0, 0]
    assert run.recorder.num_steps == 4


def test_the_summary_of_three_requests_by_hand() -> None:
    summary = summarise(simulate(THREE, BASE))

    # The first has a gap of 3 s, the second waited 4.5 s for its first token, the third is good.
    assert (summary.num_requests, summary.num_completed, summary.num_good) == (3, 3, 1)
    assert summary.outcomes == {"length": 3}
    assert summary.duration_s == 31.5
    assert summary.goodput_per_s == pytest.approx(1 / 31.5)
    assert summary.output_tokens_per_s == pytest.approx(6 / 31.5)
    assert summary.ttft.mean_s == pytest.approx((2.0 + 4.5 + 1.5) / 3)
    assert summary.ttft.p50_s == pytest.approx(2.0)
    assert summary.queue.max_s == pytest.approx(1.5)
    assert summary.itl.mean_s == pytest.approx((3.0 + 1.0 + 1.0) / 3)
    assert summary.itl.max_s == pytest.approx(3.0)
    assert summary.itl.p50_s == pytest.approx(1.0, rel=0.006)
    assert summary.prefix_hit_rate == 0.0
    assert summary.served_ratio is None


def test_memory_samples_equal_values_computed_by_hand() -> None:
    run = simulate(THREE, BASE)
    samples = run.recorder.samples

    # After step 1: 10 tokens in 3 blocks. After step 2: 11 and 20 tokens in 3 and 5 blocks.
    assert samples.num_used_blocks[:2] == [3, 8]
    assert samples.num_unused_tokens[:2] == [2, 1]
    assert samples.num_running[:2] == [1, 2]


def test_static_batches_run_to_their_end() -> None:
    config = dataclasses.replace(BASE, policy=BatchingPolicy.STATIC, batch_size=2)
    trace = [request(0.0, 10, 1), request(4.0, 10, 3), request(4.5, 10, 1)]

    run = simulate(trace, config)

    # The first waits for a second; both prefill in 3 s. The third comes meanwhile, and is let in
    # when all is done, at 9, since no more will come.
    assert column(run, "admitted_s") == [4.0, 4.0, 9.0]
    assert column(run, "end_s") == [7.0, 9.0, 11.0]


def test_dynamic_batches_wait_at_most_batch_wait_s() -> None:
    config = dataclasses.replace(
        BASE, policy=BatchingPolicy.DYNAMIC, batch_size=2, batch_wait_s=1.0
    )
    trace = [request(0.0, 10, 1), request(4.0, 10, 3), request(4.5, 10, 1), request(50.0, 10, 1)]

    run = simulate(trace, config)

    assert column(run, "admitted_s") == [1.0, 4.5, 4.5, 50.0]
    assert column(run, "end_s")[:3] == [3.0, 9.5, 7.5]


@pytest.mark.parametrize("policy", list(BatchingPolicy))
def test_every_request_ends_once_with_all_its_tokens(policy: BatchingPolicy) -> None:
    synthetic = SyntheticConfig(
        rate_per_s=4.0,
        duration_s=60.0,
        mean_prompt_tokens=30.0,
        max_prompt_tokens=90,
        mean_output_tokens=12.0,
        max_output_tokens=30,
        tenants=(TenantShare(name="a"), TenantShare(name="b")),
    )
    cost = CostModel(step_s=0.05, prefill_token_s=1e-3, decode_slot_s=1e-3, context_token_s=0.0)
    # Few blocks, so that requests are preempted.
    config = dataclasses.replace(BASE, policy=policy, cost=cost, max_num_seqs=16, num_blocks=48)
    trace = list(synthetic_trace(synthetic))

    run, again = simulate(trace, config), simulate(trace, config)

    table = run.recorder.table
    assert len(table) == run.recorder.num_ended == len(trace)
    np.testing.assert_array_equal(
        table.counts("num_output_tokens"), [r.num_output_tokens for r in trace]
    )
    assert summarise(run).outcomes == {"length": len(trace)}
    assert int(run.recorder.served_tokens().sum()) == sum(r.num_output_tokens for r in trace)
    assert summarise(run) == summarise(again)
    if policy is BatchingPolicy.FCFS:
        assert summarise(run).num_preemptions > 0


def test_requests_that_cannot_be_are_counted_and_not_run() -> None:
    trace = [
        request(0.0, 100, 29),
        request(0.0, 30, 5, deadline_s=4.5),
        request(0.0, 10, 2),
        request(0.5, 10, 2, ttft_deadline_s=1.0),
    ]

    run = simulate(trace, BASE)

    summary = summarise(run)
    # 129 tokens are one too many. Two prefill together until 5 s: too late for one
    # of them, and for the one that came meanwhile.
    assert summary.outcomes["prompt_too_long"] == 1
    assert summary.outcomes["ttft_deadline_exceeded"] == 1
    assert summary.outcomes["deadline_exceeded"] == 1
    assert summary.outcomes["length"] == 1
    assert summary.prefill_waste == pytest.approx(30 / 40)


def test_a_bounded_queue_rejects() -> None:
    config = dataclasses.replace(BASE, scheduler=SchedulerConfig(max_num_waiting=1))

    summary = summarise(simulate([request(0.0, 10, 2) for _ in range(3)], config))

    assert summary.outcomes == {"length": 1, "queue_full": 2}


@pytest.mark.parametrize("block_size", [4, 3])
def test_prompts_of_one_tenant_share_their_prefix(block_size: int) -> None:
    shared: dict[str, Any] = {"prefix_block_tokens": 8}
    trace = [
        request(0.0, 24, 1, prefix_ids=(0, 1, 2), tenant="a", **shared),
        request(50.0, 24, 1, prefix_ids=(0, 1, 3), tenant="a", **shared),
        request(100.0, 24, 1, prefix_ids=(0, 1, 2), tenant="b", **shared),
    ]

    run = simulate(trace, dataclasses.replace(BASE, block_size=block_size))
    off = simulate(trace, dataclasses.replace(BASE, has_prefix_caching=False))

    # 16 tokens are common: four blocks of 4, five whole blocks of 3.
    found = 16 // block_size * block_size
    assert run.recorder.table.counts("num_cached_tokens").tolist() == [0, found, 0]
    assert column(run, "first_token_s")[1] == pytest.approx(50.0 + 1.0 + 0.1 * (24 - found))
    assert off.recorder.table.counts("num_cached_tokens").tolist() == [0, 0, 0]


def test_with_memory_to_spare_every_reuse_is_a_hit() -> None:
    # Conversations of one tenant whose turns continue from one another, two blocks of the trace a
    # turn.
    trace = [
        request(
            100.0 * i,
            16 * (turn + 1),
            1,
            prefix_ids=tuple(100 * conversation + k for k in range(2 * turn + 2)),
            prefix_block_tokens=8,
        )
        for i, (turn, conversation) in enumerate(itertools.product(range(4), range(3)))
    ]

    run = simulate(trace, BASE)

    best = optimal_hit_rate(trace, num_cache_tokens=10_000, block_size=BASE.block_size)
    assert summarise(run).prefix_hit_rate == best == 0.6


def test_the_served_ratio_counts_while_both_wait() -> None:
    config = dataclasses.replace(
        BASE, max_num_seqs=1, scheduler=dataclasses.replace(BASE.scheduler)
    )
    # Three of a for one of b, all there from the start: first come, first served gives that ratio.
    trace = [request(0.0, 10, 8, tenant=t) for t in ("a", "a", "a", "b") * 10]

    ratio = summarise(simulate(trace, config)).served_ratio

    assert ratio == pytest.approx(3.0, rel=0.1)


def test_a_report_is_complete(tmp_path: Path) -> None:
    run = simulate(THREE, BASE)
    summary = summarise(run)

    write_report(run, summary, tmp_path / "report")

    document = json.loads((tmp_path / "report" / SUMMARY_FILE).read_text())
    assert document["figures"]["num_good"] == 1
    assert document["settings"]["num_blocks"] == 64
    with (tmp_path / "report" / REQUESTS_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["first_token_s"]) for row in rows] == [2.0, 5.0, 31.5]
    assert [row["outcome"] for row in rows] == ["length"] * 3
    text = (tmp_path / "report" / PAGE_FILE).read_text()
    assert text.count("<svg") == 5
    for outside in ("<script", "<link", "src=", "@import"):
        assert outside not in text
    assert any("goodput" in line for line in summary_lines(summary))


def test_a_run_with_only_rejections_can_be_summarised(tmp_path: Path) -> None:
    run = simulate([request(0.0, 500, 1)], BASE)
    summary = summarise(run)

    write_report(run, summary, tmp_path)

    assert math.isnan(summary.ttft.p50_s)
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["figures"]["ttft"]["p50_s"] is None
