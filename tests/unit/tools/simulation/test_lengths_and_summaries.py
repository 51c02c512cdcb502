"""Requests whose `max_tokens` exceeds the length of their output, and what the summary of a run
contains.
"""

import dataclasses
import math

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import summarise
from penstock.tools.simulation.synthetic import SyntheticConfig, synthetic_trace
from penstock.tools.targets import Targets

TRACE = list(synthetic_trace(SyntheticConfig(rate_per_s=20.0, duration_s=3.0, seed=3)))
BASE = SimulationConfig(max_num_seqs=8, num_blocks=4096, sample_every_steps=1)


@pytest.mark.parametrize("policy", [BatchingPolicy.FCFS, BatchingPolicy.FAIR])
def test_asking_for_more_than_is_generated_changes_no_length(policy: BatchingPolicy) -> None:
    exact = simulate(TRACE, dataclasses.replace(BASE, policy=policy))
    asking = simulate(TRACE, dataclasses.replace(BASE, policy=policy, max_tokens=4000))

    lengths = [request.num_output_tokens for request in TRACE]
    assert asking.recorder.table.counts("num_output_tokens").tolist() == lengths
    assert set(summarise(asking).outcomes) == {"stop"}
    assert set(summarise(exact).outcomes) == {"length"}
    # No client looks at a limit that memory does not depend on.
    assert summarise(asking).ttft == summarise(exact).ttft


def test_generating_more_than_the_rest_needs_a_longer_request() -> None:
    long = TraceRequest(arrival_s=0.0, num_prompt_tokens=5, num_output_tokens=9)

    run = simulate([long], dataclasses.replace(BASE, max_tokens=2))

    assert run.recorder.table.counts("num_output_tokens").tolist() == [9]


@pytest.mark.parametrize(("max_tokens", "outcome"), [(None, "length"), (64, "stop"), (9, "length")])
def test_only_outputs_below_the_limit_end_by_themselves(
    max_tokens: int | None, outcome: str
) -> None:
    trace = [TraceRequest(arrival_s=0.0, num_prompt_tokens=5, num_output_tokens=9)]

    run = simulate(trace, dataclasses.replace(BASE, max_tokens=max_tokens))

    assert set(summarise(run).outcomes) == {outcome}


@pytest.mark.parametrize(("max_tokens", "most_expired"), [(None, 8), (128, 16)])
def test_the_scheduler_knows_lengths_or_learns_them(
    max_tokens: int | None, most_expired: int
) -> None:
    """Under overload, few admitted requests miss the deadline of their output.

    If `max_tokens` is None, each request asks for exactly its output length. Otherwise the
    scheduler learns lengths, once sixteen outputs have ended.
    """
    trace = [
        TraceRequest(
            arrival_s=5.0 * index, num_prompt_tokens=4, num_output_tokens=60, deadline_s=100.0
        )
        for index in range(200)
    ]
    config = dataclasses.replace(
        ONE_AT_A_TIME,
        policy=BatchingPolicy.FAIR,
        max_num_seqs=4,
        num_blocks=256,
        max_tokens=max_tokens,
    )

    summary = summarise(simulate(trace, config))

    assert summary.num_expired <= most_expired
    assert summary.num_completed >= 50


def test_max_tokens_is_checked() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        SimulationConfig(max_tokens=0)


SECOND_A_STEP = CostModel(step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)
ONE_AT_A_TIME = SimulationConfig(
    policy=BatchingPolicy.FCFS,
    cost=SECOND_A_STEP,
    targets=Targets(ttft_s=2.0, itl_s=2.0),
    max_num_seqs=1,
    num_blocks=64,
    sample_every_steps=1,
)


def late_pair(tenant: str) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=0.0, num_prompt_tokens=4, num_output_tokens=10, tenant="a"),
        TraceRequest(
            arrival_s=0.5,
            num_prompt_tokens=4,
            num_output_tokens=1,
            tenant=tenant,
            ttft_deadline_s=3.0,
        ),
    ]


def test_an_expired_request_is_late_and_waited_for_ever() -> None:
    config = dataclasses.replace(ONE_AT_A_TIME, scheduler=SchedulerConfig(deadline_admission=False))

    summary = summarise(simulate(late_pair("b"), config))

    assert (summary.num_expired, summary.num_rejected, summary.num_good) == (1, 0, 1)
    a, b = summary.tenants
    assert (a.num_late, b.num_late) == (0, 1)
    assert a.ttft_p99_of_all_s == 1.0
    assert b.ttft_p99_of_all_s == math.inf
    assert math.isnan(b.ttft.p99_s)


def test_a_request_rejected_for_a_full_queue_is_distinguished() -> None:
    config = dataclasses.replace(
        ONE_AT_A_TIME, scheduler=SchedulerConfig(deadline_admission=False, max_num_waiting=1)
    )
    third = TraceRequest(arrival_s=0.6, num_prompt_tokens=4, num_output_tokens=1)

    summary = summarise(simulate([*late_pair("a"), third], config))

    assert (summary.num_expired, summary.num_rejected) == (1, 1)
