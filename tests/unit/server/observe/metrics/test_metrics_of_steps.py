"""The metrics of an engine's steps, also after its death."""

from __future__ import annotations

from typing import Any

from penstock.scheduler.events import WaitReason
from penstock.server.ipc.board import LoadState
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from support.metric_samples import read, value
from support.reports import engine_hello, heartbeat, steps

FULL = {
    "num_running": 4, "num_waiting": 2, "num_waiting_tokens": 99, "num_used_blocks": 10,
    "num_cached_blocks": 5, "num_free_blocks": 25, "waits_for": int(WaitReason.SLOTS),
}  # fmt: skip


def service_metrics() -> ServiceMetrics:
    return ServiceMetrics(model="demo")


def load(epoch: int = 1, **settings: Any) -> LoadState:
    nothing = dict.fromkeys(("num_running", "num_waiting", "num_waiting_tokens"), 0)
    nothing |= dict.fromkeys(("num_used_blocks", "num_output_tokens"), 0)
    return LoadState(epoch=epoch, **{**nothing, **settings})


def full(engine_load: LoadState | None) -> ServiceMetrics:
    """Return the metrics of an engine whose last step has the values of FULL. The engine reports
    `engine_load` as its load.
    """
    metrics = ServiceMetrics(model="demo", load=lambda: engine_load)
    metrics.add_heartbeat(heartbeat())
    metrics.add_steps(1, steps(FULL), 0)
    return metrics


def test_steps_are_taken_by_the_array() -> None:
    metrics = service_metrics()
    metrics.add_heartbeat(heartbeat())
    rows = steps(
        {"itl_s": 2**-7, "num_itl": 200, "num_tokens": 201, "num_decodes": 200, "num_admitted": 1,
         "num_prefill_tokens": 56, "num_prefill_rows": 2, "predicted_s": 2**-7},
        {"itl_s": 2**-6, "num_itl": 8, "num_tokens": 8, "num_preempted": 3, "predicted_s": 2**-6},
        {"num_running": 7, "num_waiting": 4, "num_waiting_tokens": 99, "num_used_blocks": 10,
         "num_cached_blocks": 20, "num_free_blocks": 10, "waits_for": int(WaitReason.BLOCKS)},
    )  # fmt: skip

    metrics.add_steps(1, rows, 2)

    samples = read(metrics)
    assert value(samples, "inter_token_latency_seconds_count") == 208
    assert value(samples, "inter_token_latency_seconds_sum") == 200 * 2**-7 + 8 * 2**-6
    assert value(samples, "inter_token_latency_seconds_bucket", le="0.0075") == 0
    assert value(samples, "inter_token_latency_seconds_bucket", le="0.01") == 200
    assert value(samples, "step_seconds_sum") == 3 * 2**-7
    assert value(samples, "scheduler_seconds_sum") == 3 * 2**-10
    assert value(samples, "step_tokens_sum") == 256
    assert value(samples, "step_requests_sum") == 202
    assert value(samples, "step_prediction_error_seconds_count") == 2
    assert value(samples, "step_prediction_error_seconds_sum") == 2**-7
    assert value(samples, "step_predicted_seconds_total") == 2**-7 + 2**-6
    assert value(samples, "step_measured_seconds_total") == 2 * 2**-7
    assert value(samples, "generation_tokens_total") == 209
    assert value(samples, "prefill_tokens_total") == 56
    assert value(samples, "admissions_total") == 1
    assert value(samples, "preemptions_total") == 3
    assert value(samples, "steps_missed_total") == 2
    assert value(samples, "num_requests_running") == 7
    assert value(samples, "num_requests_waiting") == 4
    assert value(samples, "num_tokens_waiting") == 99
    assert value(samples, "kv_cache_blocks", state="cached") == 20
    assert value(samples, "kv_cache_usage_ratio") == 0.25
    assert value(samples, "queue_head_waits", reason="blocks") == 1
    assert value(samples, "queue_head_waits", reason="slots") == 0


def test_the_recordings_own_counts_make_up_for_steps_that_were_missed() -> None:
    metrics = service_metrics()
    totals = {"num_output_tokens": 25, "num_admitted": 2, "num_preempted": 0}
    metrics.add_steps(1, steps({"num_tokens": 5}), 0, totals)
    totals = {"num_output_tokens": 30, "num_admitted": 2, "num_preempted": 1}
    metrics.add_steps(1, steps({"num_tokens": 5}), 3, totals)
    metrics.add_steps(2, steps({"num_tokens": 4}), 0)

    samples = read(metrics)
    assert value(samples, "generation_tokens_total") == 34
    assert value(samples, "admissions_total") == 2
    assert value(samples, "preemptions_total") == 1


def test_a_dead_engine_has_no_running_requests() -> None:
    metrics = service_metrics()
    metrics.set_engine(engine_hello())
    metrics.add_heartbeat(heartbeat())
    row = {"num_running": 7, "num_waiting": 4, "num_used_blocks": 10, "num_free_blocks": 30}
    metrics.add_steps(1, steps(row), 0)
    metrics.add_heartbeat(heartbeat(is_engine_up=False))
    metrics.add_steps(1, steps({**row, "num_tokens": 6}), 0)  # read after its death

    samples = read(metrics)
    assert value(samples, "engine_up") == 0
    assert value(samples, "num_requests_running") == 0
    assert value(samples, "kv_cache_usage_ratio") == 0
    assert value(samples, "kv_cache_blocks", state="free") == 40
    assert value(samples, "kv_cache_total_blocks") == 40
    assert value(samples, "kv_cache_block_size_tokens") == 16
    assert value(samples, "max_requests_running") == 8
    assert value(samples, "generation_tokens_total") == 6

    metrics.add_heartbeat(heartbeat(epoch=3))
    metrics.add_steps(1, steps(row), 0)
    samples = read(metrics)
    assert value(samples, "engine_up") == 1
    assert value(samples, "engine_restarts_total") == 2
    assert value(samples, "num_requests_running") == 0


def test_requests_that_left_after_the_last_step_are_not_there() -> None:
    samples = read(full(load()))

    assert value(samples, "num_requests_running") == 0
    assert value(samples, "num_requests_waiting") == 0
    assert value(samples, "num_tokens_waiting") == 0
    assert value(samples, "kv_cache_usage_ratio") == 0
    for state, num in {"used": 0, "cached": 15, "free": 25}.items():
        assert value(samples, "kv_cache_blocks", state=state) == num
    for reason in WaitReason:
        assert value(samples, "queue_head_waits", reason=reason.name.lower()) == 0


def test_the_engines_report_is_used_where_it_is_newer_than_the_last_step() -> None:
    engine_load = load(num_running=3, num_waiting=1, num_waiting_tokens=7, num_used_blocks=20)

    samples = read(full(engine_load))

    assert value(samples, "num_requests_running") == 3
    assert value(samples, "num_requests_waiting") == 1
    assert value(samples, "num_tokens_waiting") == 7
    assert value(samples, "queue_head_waits", reason="slots") == 1
    for state, num in {"used": 20, "cached": 0, "free": 20}.items():
        assert value(samples, "kv_cache_blocks", state=state) == num
    assert value(samples, "kv_cache_usage_ratio") == 0.5


def test_an_engine_that_reports_nothing_is_as_its_last_step_left_it() -> None:
    samples = read(full(None))

    assert value(samples, "num_requests_running") == 4
    assert value(samples, "queue_head_waits", reason="slots") == 1
    for state, num in {"used": 10, "cached": 5, "free": 25}.items():
        assert value(samples, "kv_cache_blocks", state=state) == num


def test_a_load_is_reported_of_the_engine_that_sent_it() -> None:
    busy = {"num_running": 3, "num_waiting": 1, "num_used_blocks": 20}

    of_the_next = read(full(load(epoch=2, num_running=1, num_waiting=1, num_used_blocks=2)))
    metrics = full(load(epoch=1, **busy))
    metrics.add_heartbeat(heartbeat(epoch=2))
    of_the_last = read(metrics)
    metrics = full(load(epoch=1, **busy))
    metrics.add_heartbeat(heartbeat(is_engine_up=False))
    of_a_dead_one = read(metrics)

    # Nothing is known yet of what the new one keeps or lacks, nor how large it is.
    assert value(of_the_next, "num_requests_running") == 1
    assert value(of_the_next, "kv_cache_blocks", state="free") == 0
    assert value(of_the_next, "kv_cache_blocks", state="cached") == 0
    assert value(of_the_next, "queue_head_waits", reason="slots") == 0
    for samples in (of_the_last, of_a_dead_one):
        assert value(samples, "num_requests_running") == 0
        assert value(samples, "num_requests_waiting") == 0
        assert value(samples, "kv_cache_usage_ratio") == 0


def test_an_engine_that_has_taken_no_step_reports_what_it_holds() -> None:
    metrics = ServiceMetrics(model="demo", load=lambda: load(num_waiting=2, num_used_blocks=10))
    metrics.set_engine(engine_hello())
    metrics.add_heartbeat(heartbeat())

    samples = read(metrics)

    assert value(samples, "num_requests_waiting") == 2
    assert value(samples, "kv_cache_blocks", state="free") == 30
    assert value(samples, "kv_cache_usage_ratio") == 0.25


def test_cut_retentions_are_counted_over_engines() -> None:
    engine_load = load(num_shortened_retentions=2, num_dropped_blocks=40)
    metrics = ServiceMetrics(model="demo", load=lambda: engine_load)
    metrics.add_heartbeat(heartbeat())
    for _ in range(2):
        samples = read(metrics)
        assert value(samples, "retentions_shortened_total") == 2
        assert value(samples, "retention_blocks_dropped_total") == 40
    engine_load = load(epoch=2, num_shortened_retentions=1, num_dropped_blocks=3)
    metrics.add_heartbeat(heartbeat(epoch=2))
    samples = read(metrics)
    assert value(samples, "retentions_shortened_total") == 3
    assert value(samples, "retention_blocks_dropped_total") == 43
