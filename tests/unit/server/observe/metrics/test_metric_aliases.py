"""Our metrics under the names that other servers use."""

from __future__ import annotations

import pytest

from penstock.server.observe.metrics.exposition import DIALECTS, Exposition
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from support.metric_samples import read, service_metrics
from support.reports import heartbeat, outcome, record, steps


def reported() -> ServiceMetrics:
    metrics = service_metrics()
    metrics.add_records([record(ttft_s=0.25), record(ttft_s=0.5, code=13)])
    metrics.add_heartbeat(
        heartbeat(
            1,
            outcome(4, finish_reason="STOP"),
            outcome(2, method="penstock.v1.GenerationService/GenerateOnce"),
            outcome(1, finish_reason="LENGTH"),
            outcome(3, code=13, reason="INTERNAL", finish_reason=""),
        )
    )
    row = {"num_running": 5, "num_waiting": 2, "num_used_blocks": 3, "num_free_blocks": 9}
    metrics.add_steps(1, steps(row), 0)
    return metrics


def test_tensorrt_llms_names_report_our_numbers() -> None:
    samples = read(reported(), "trtllm")

    def sample(name: str, *labels: str) -> float:
        return samples[name, frozenset(labels)]

    assert sample("trtllm_num_requests_running") == 5
    assert sample("trtllm_num_requests_waiting") == 2
    assert sample("trtllm_kv_cache_utilization") == 0.25
    assert sample("trtllm_kv_cache_free_blocks") == 9
    assert sample("trtllm_kv_cache_max_blocks") == 12
    assert sample("trtllm_request_success_total", "finished_reason=stop") == 6
    assert sample("trtllm_request_success_total", "finished_reason=length") == 1
    assert sample("trtllm_request_error_total") == 3
    assert sample("trtllm_time_to_first_token_seconds_sum") == 0.75
    assert sample("trtllm_time_to_first_token_seconds_bucket", "le=0.3") == 1
    # Those that failed are among them.
    assert sample("trtllm_e2e_request_latency_seconds_count") == 2
    # Ours are there as ever.
    assert sample("penstock_num_requests_running") == 5


def test_the_names_of_the_conventions() -> None:
    samples = read(reported(), "gen_ai")
    assert samples["gen_ai_server_time_to_first_token_seconds_count", frozenset()] == 2


def test_aliases_are_reported_only_if_configured() -> None:
    assert not any(name.startswith(("trtllm", "gen_ai")) for name, _ in read(reported()))


@pytest.mark.parametrize("compat", sorted(DIALECTS))
def test_every_alias_is_reported_from_the_start(compat: str) -> None:
    reported_names = {name for name, _ in read(service_metrics(), compat)}
    for alias in DIALECTS[compat].aliases:
        assert {alias.name, f"{alias.name}_count"} & reported_names, alias.name


def test_an_unknown_dialect_is_rejected() -> None:
    with pytest.raises(ValueError, match="compat must be one of trtllm, gen_ai"):
        Exposition(service_metrics()).render("", "vllm")
