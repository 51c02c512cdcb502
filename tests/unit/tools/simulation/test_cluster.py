"""How requests are routed to several replicas, the totals of the replicas, and that runs are
reproducible.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.cluster import ClusterConfig, simulate_cluster
from penstock.tools.simulation.cluster_report import (
    cluster_charts,
    cluster_json,
    cluster_lines,
    summarise_cluster,
    write_cluster_report,
)
from penstock.tools.simulation.load_signal import LoadSignal
from penstock.tools.simulation.routing import RouterKind, RoutingConfig
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.simulation.simulate import SimulationProgress, simulate
from penstock.tools.simulation.summary import summarise
from penstock.tools.simulation.synthetic import SyntheticConfig, TenantShare, synthetic_trace

ONE_SECOND_STEPS = CostModel(
    step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0
)
SLOW = SimulationConfig(cost=ONE_SECOND_STEPS, max_num_seqs=1, num_blocks=64)
BUSY = SyntheticConfig(
    rate_per_s=20, duration_s=5, tenants=(TenantShare(name="a"), TenantShare(name="b")), seed=3
)


def asks(
    arrival_s: float, num_output: int = 1, prefix_ids: tuple[int, ...] = (), num_prompt: int = 8
) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        prefix_ids=prefix_ids,
        prefix_block_tokens=32,
    )


def cluster(
    router: RouterKind,
    num_replicas: int = 2,
    replica: SimulationConfig = SLOW,
    delay_s: float = 0.0,
) -> ClusterConfig:
    return ClusterConfig(
        replica=replica,
        num_replicas=num_replicas,
        routing=RoutingConfig(router=router, load_signal_delay_s=delay_s),
    )


def test_one_replica_gives_the_result_of_a_single_server() -> None:
    config = SimulationConfig(policy=BatchingPolicy.FAIR)
    alone = summarise(simulate(synthetic_trace(BUSY), config))

    run = simulate_cluster(synthetic_trace(BUSY), cluster(RouterKind.LEAST_LOADED, 1, config))
    summary = summarise_cluster(run)

    # A mean of the same numbers, added up in another order.
    assert summary.total.kv_waste == pytest.approx(alone.kv_waste)
    assert dataclasses.replace(summary.total, kv_waste=alone.kv_waste) == alone
    assert summary.replicas == (alone,)


def test_requests_keep_their_rows_wherever_they_went() -> None:
    trace = list(synthetic_trace(BUSY))
    run = simulate_cluster(iter(trace), cluster(RouterKind.ROUND_ROBIN, 3, SimulationConfig()))
    table = run.total.recorder.table

    assert run.routes.tolist() == [i % 3 for i in range(len(trace))]
    assert table.seconds("arrival_s").tolist() == [r.arrival_s for r in trace]
    assert table.counts("num_output_tokens").tolist() == [r.num_output_tokens for r in trace]
    names = [table.tenants[index] for index in table.counts("tenant")]
    assert names == [request.tenant for request in trace]
    served = run.total.recorder.served_tokens().sum(axis=0)
    for index, tenant in enumerate(table.tenants):
        assert served[index] == sum(r.num_output_tokens for r in trace if r.tenant == tenant)


def test_totals_are_the_sums_over_replicas() -> None:
    run = simulate_cluster(
        synthetic_trace(BUSY), cluster(RouterKind.LEAST_LOADED, 3, SimulationConfig())
    )
    summary = summarise_cluster(run)

    assert summary.total.num_requests == sum(r.num_requests for r in summary.replicas)
    assert summary.total.num_good == sum(r.num_good for r in summary.replicas)
    assert summary.total.num_steps == sum(r.num_steps for r in summary.replicas)
    assert summary.total.ttft.max_s == max(r.ttft.max_s for r in summary.replicas)
    assert summary.total.itl.max_s == max(r.itl.max_s for r in summary.replicas)
    used = [replica.kv_utilisation for replica in summary.replicas]
    assert summary.total.kv_utilisation == pytest.approx(np.mean(used))


def test_the_least_loaded_is_notified_of_ends_when_they_happen() -> None:
    # Replica 0 is busy until 5 s, replica 1 until 1 s; then 1, idle, is chosen twice over.
    trace = [asks(0.0, 5), asks(0.0, 1), asks(2.0, 1), asks(3.5, 1)]

    exact = simulate_cluster(trace, cluster(RouterKind.LEAST_LOADED))
    blind = simulate_cluster(trace, cluster(RouterKind.ROUND_ROBIN))

    assert exact.routes.tolist() == [0, 1, 1, 1]
    assert blind.routes.tolist() == [0, 1, 0, 1]
    assert exact.total.recorder.table.seconds("first_token_s").tolist() == [1, 1, 3, 4.5]
    assert blind.total.recorder.table.seconds("first_token_s").tolist() == [1, 1, 6, 4.5]


def test_a_delayed_signal_routes_by_earlier_loads() -> None:
    trace = [asks(0.0, 9), asks(0.5, 1), asks(1.0, 1), asks(1.6, 1)]

    stale = simulate_cluster(trace, cluster(RouterKind.LEAST_LOADED, delay_s=1.0))

    # At 0.5 s nothing is known: in turn. At 1.0 s the first is known, and not yet the second. At
    # 1.6 s one on each is known, and equal ones go in turn: to the busy one.
    assert stale.routes.tolist() == [0, 1, 1, 0]


def test_prefixes_are_found_where_they_are_sent() -> None:
    config = SimulationConfig(num_blocks=512)
    trace = [
        asks(
            10.0 * turn + conversation,
            2,
            tuple(range(100 * conversation, 100 * conversation + turn + 1)),
            32 * (turn + 1),
        )
        for turn in range(4)
        for conversation in range(3)
    ]

    by_turn = simulate_cluster(trace, cluster(RouterKind.ROUND_ROBIN, 2, config))
    aware = simulate_cluster(trace, cluster(RouterKind.PREFIX_AWARE, 2, config))

    assert summarise_cluster(aware).total.prefix_hit_rate > 0.5
    assert summarise_cluster(by_turn).total.prefix_hit_rate < 0.4
    homes = aware.routes.reshape(4, 3)
    assert (homes == homes[0]).all()


@pytest.mark.parametrize("router", list(RouterKind))
def test_a_run_is_the_same_again(router: RouterKind) -> None:
    config = cluster(router, 3, SimulationConfig(policy=BatchingPolicy.FAIR), delay_s=0.2)
    config = dataclasses.replace(
        config, routing=dataclasses.replace(config.routing, load_signal=LoadSignal.TOKENS)
    )

    first, second = (simulate_cluster(synthetic_trace(BUSY), config) for _ in range(2))

    assert first.routes.tolist() == second.routes.tolist()
    assert summarise_cluster(first) == summarise_cluster(second)


def test_more_replicas_than_requests() -> None:
    reported: list[SimulationProgress] = []
    run = simulate_cluster([asks(0.0)], cluster(RouterKind.LEAST_LOADED, 5), reported.append)

    assert run.numbers == (0,)
    assert summarise_cluster(run).total.num_completed == 1
    assert reported[-1].num_ended == 1


def test_a_report_contains_the_totals_and_every_replica(tmp_path: Path) -> None:
    run = simulate_cluster(
        synthetic_trace(BUSY), cluster(RouterKind.ROUND_ROBIN, 2, SimulationConfig())
    )
    summary = summarise_cluster(run)

    write_cluster_report(run, summary, tmp_path)

    document = json.loads(cluster_json(run, summary))
    assert [replica["replica"] for replica in document["replicas"]] == [0, 1]
    assert document["settings"]["routing"]["router"] == "round_robin"
    lines = cluster_lines(run, summary)
    assert "round_robin, 2 replicas, 1.0" in "\n".join(lines)
    assert len(lines[-1].split()) == len(lines[-2].split())
    charts = {chart.name: chart for chart in cluster_charts(run)}
    names = [series.name for series in charts["load"].series]
    assert names == ["0", "1"]
    rows = (tmp_path / "requests.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0].endswith(",replica")
    assert [row.rpartition(",")[2] for row in rows[1:4]] == ["0", "1", "0"]
    assert "<h2>Replicas</h2>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_cluster_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="num_replicas"):
        ClusterConfig(replica=SLOW, num_replicas=0)
