"""Metrics that are computed from records, steps and heartbeats."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import pytest

from penstock.scheduler.events import Wait
from penstock.server.observe.metrics import labels
from penstock.server.observe.metrics.catalogue import CATALOGUE
from penstock.server.observe.request_record import RequestOptions, Segment, SegmentKind
from penstock.server.rpc.service_names import REQUEST_METHODS
from support.metric_samples import names, read, service_metrics, total, value
from support.reports import GENERATE, heartbeat, outcome, record, steps


def test_metrics_of_alerts_are_reported_before_any_event() -> None:
    samples = read(service_metrics())

    for reason in labels.REASONS:
        assert value(samples, "request_errors_total", reason=reason) == 0
    for reason in labels.ADMISSION_REJECTIONS:
        assert value(samples, "admission_rejected_total", reason=reason) == 0
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_ratio"):
        assert value(samples, name) == 0
    for name in ("engine_up", "engine_restarts_total", "preemptions_total", "fronts"):
        assert value(samples, name) == 0
    assert value(samples, "inter_token_latency_seconds_count") == 0
    assert value(samples, "request_duration_seconds_count", outcome="error") == 0


def test_a_record_fills_the_histograms() -> None:
    metrics = service_metrics()
    wait = Wait(blocks_s=0.125, fairness_s=0.25, other_s=0.125)
    reported = record(
        Segment(SegmentKind.PREPARE, 100.0, 100.25),
        Segment(SegmentKind.QUEUE, 100.25, 100.5, wait=wait),
        Segment(SegmentKind.PREFILL, 100.5, 101.0),
        Segment(SegmentKind.DECODE, 101.0, 102.0),
        Segment(SegmentKind.QUEUE, 102.0, 102.25, wait=Wait(slots_s=0.25)),
        Segment(SegmentKind.PREFILL, 102.25, 102.5),
        Segment(SegmentKind.DECODE, 102.5, 103.5),
        Segment(SegmentKind.DELIVER, 103.5, 104.0),
        end_s=104.0,
        ttft_s=1.0,
        num_prompt_tokens=48,
        num_cached_tokens=32,
        num_completion_tokens=4,
        num_stalls=2,
        stalled_s=0.5,
        num_replays=1,
    )

    metrics.add_records([reported, reported])

    samples = read(metrics)
    for name, seconds in {
        "time_to_first_token": 1.0,
        "time_per_output_token": 1.0,  # (4 - 1) / (4 - 1)
        "request_prepare": 0.25,
        "request_queue": 0.5,
        "request_prefill": 0.75,
        "request_decode": 2.0,
        "request_deliver": 0.5,
        "stream_stalled": 0.5,
    }.items():
        assert value(samples, f"{name}_seconds_sum") == 2 * seconds
        assert value(samples, f"{name}_seconds_count") == 2
    assert value(samples, "request_duration_seconds_sum", outcome="ok") == 8
    assert value(samples, "queue_wait_seconds_total", reason="blocks") == 0.25
    assert value(samples, "queue_wait_seconds_total", reason="slots") == 0.5
    assert value(samples, "queue_wait_seconds_total", reason="fairness") == 0.5
    assert value(samples, "queue_wait_seconds_total", reason="other") == 0.25
    assert value(samples, "prompt_tokens_total") == 96
    assert value(samples, "prefix_cache_queries_tokens_total") == 96
    assert value(samples, "prefix_cache_hits_tokens_total") == 64
    assert value(samples, "stream_stalls_total") == 4
    assert value(samples, "request_replays_total") == 2


def test_phases_that_a_request_did_not_reach_are_not_observed() -> None:
    metrics = service_metrics()
    rejected = record(
        Segment(SegmentKind.PREPARE, 100.0, 100.5), code=8, reason="QUEUE_FULL", finish_reasons=()
    )

    metrics.add_records([rejected])

    samples = read(metrics)
    for name in ("time_to_first_token", "time_per_output_token", "request_queue", "request_decode"):
        assert value(samples, f"{name}_seconds_count") == 0
    assert value(samples, "request_prepare_seconds_count") == 1
    assert value(samples, "prompt_tokens_total") == 0
    assert value(samples, "request_duration_seconds_count", outcome="error") == 1


def test_time_per_output_token_is_of_one_output() -> None:
    metrics = service_metrics()

    metrics.add_records(
        [
            record(
                end_s=102.0,
                ttft_s=1.0,
                num_completion_tokens=10,
                options=RequestOptions(num_outputs=2),
            )
        ]
    )

    assert value(read(metrics), "time_per_output_token_seconds_sum") == 0.25


@pytest.mark.parametrize(
    ("code", "finish_reason", "expected"),
    [(0, "STOP", "ok"), (0, "CANCELLED", "cancelled"), (1, "", "cancelled"), (13, "", "error")],
)
def test_a_client_that_disconnects_is_no_error(
    code: int, finish_reason: str, expected: str
) -> None:
    metrics = service_metrics()

    metrics.add_records([record(code=code, finish_reasons=(finish_reason,))])

    assert value(read(metrics), "request_duration_seconds_count", outcome=expected) == 1


def test_requests_are_counted_by_heartbeats_and_not_by_records() -> None:
    metrics = service_metrics()
    metrics.add_records([record(sequence=index) for index in range(3)])
    metrics.add_heartbeat(
        heartbeat(1, outcome(10), outcome(2, code=8, reason="QUEUE_FULL", finish_reason=""))
    )
    metrics.add_heartbeat(
        heartbeat(1, outcome(11), outcome(2, code=8, reason="QUEUE_FULL", finish_reason=""))
    )
    metrics.add_heartbeat(heartbeat(2, outcome(5)))

    samples = read(metrics)
    ended_well = {"method": GENERATE, "code": "OK", "reason": "none", "finish_reason": "STOP"}
    assert value(samples, "requests_total", **ended_well) == 16
    assert total(samples, "requests_total") == 18
    assert value(samples, "request_errors_total", reason="QUEUE_FULL") == 2
    assert value(samples, "admission_rejected_total", reason="QUEUE_FULL") == 2


def test_a_front_that_dies_keeps_its_counts_and_loses_its_gauges() -> None:
    metrics = service_metrics()
    metrics.add_heartbeat(
        heartbeat(
            1, outcome(4), num_streams=9, num_live=9, num_submitted=13, num_lowered_priorities=3
        )
    )
    metrics.add_heartbeat(
        heartbeat(2, outcome(6), num_streams=1, num_submitted=7, is_draining=True)
    )
    assert value(read(metrics), "draining") == 0  # front 1 continues serving

    metrics.front_disconnected(1)
    metrics.front_disconnected(1)

    samples = read(metrics)
    assert total(samples, "requests_total") == 10
    assert value(samples, "requests_submitted_total") == 20
    assert value(samples, "priorities_lowered_total") == 3
    assert value(samples, "streams") == 1
    assert value(samples, "num_requests_live") == 0
    assert value(samples, "fronts") == 1
    assert value(samples, "draining") == 1


def test_a_front_that_reconnects_keeps_its_counts() -> None:
    metrics = service_metrics()
    metrics.add_heartbeat(heartbeat(1, outcome(4), num_streams=9))
    metrics.add_records([record(sequence=index) for index in range(6)])
    metrics.front_disconnected(1)
    metrics.add_heartbeat(heartbeat(3, outcome(1)))

    metrics.add_heartbeat(heartbeat(1, outcome(7), num_streams=9))
    metrics.add_records([record(sequence=7)])
    metrics.front_disconnected(1)

    samples = read(metrics)
    assert total(samples, "requests_total") == 8
    assert value(samples, "streams") == 0
    assert value(samples, "fronts") == 1


def test_the_last_second_of_a_killed_front_is_counted_by_its_records() -> None:
    metrics = service_metrics()
    metrics.add_heartbeat(heartbeat(1, outcome(2)))
    metrics.add_records([record(sequence=index) for index in range(5)])
    metrics.add_records([record(sequence=5, code=13, reason="INTERNAL", finish_reasons=())])

    metrics.front_disconnected(1)

    samples = read(metrics)
    assert total(samples, "requests_total") == 6
    assert value(samples, "request_errors_total", reason="INTERNAL") == 1


def test_counters_never_go_down_as_fronts_and_engines_come_and_go() -> None:
    draw = random.Random(7)
    metrics = service_metrics()
    lives: dict[int, int] = {}
    ended = epoch = num_fronts = 0
    before: Mapping[tuple[str, frozenset[str]], float] = {}
    for _ in range(40):
        if len(lives) < 3 and draw.random() < 0.3:
            num_fronts += 1
            lives[num_fronts] = 0
        if lives and draw.random() < 0.1:
            gone = draw.choice(list(lives))
            ended += lives.pop(gone)
            metrics.front_disconnected(gone)
        if draw.random() < 0.05:
            epoch += 1
        for front in lives:
            lives[front] += draw.randrange(5)
            if draw.random() < 0.9:  # heartbeats may be lost; a front's last is not
                metrics.add_heartbeat(heartbeat(front, outcome(lives[front]), epoch=epoch))
        for front, num in lives.items():
            metrics.add_heartbeat(heartbeat(front, outcome(num), epoch=epoch))
        metrics.add_steps(epoch, steps({"num_tokens": draw.randrange(9)}), 0)
        now = read(metrics)
        for key, old in before.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[key] >= old, key
        assert total(now, "requests_total") == ended + sum(lives.values())
        before = {key: number for key, number in now.items() if key[0].startswith("penstock_")}


def test_names_chosen_by_clients_create_no_series() -> None:
    metrics = service_metrics(tenants=("atlas", "borealis"))
    metrics.add_records([record()])
    num_before = len(read(metrics))

    for index in range(500):
        hostile = f'x{index}"}}\n# TYPE evil counter\nevil 1'
        metrics.add_records(
            [
                record(
                    model=hostile, tenant=hostile, method=hostile, reason=hostile,
                    finish_reasons=(hostile,), request_id=hostile, peer=hostile, code=900 + index,
                )
            ]
        )  # fmt: skip
        metrics.add_heartbeat(
            heartbeat(
                1,
                outcome(index, method=hostile, reason=hostile, finish_reason=hostile, code=-index),
                dropped_records={hostile: index} if index < 5 else {},
            )
        )
    many = heartbeat(2, dropped_records={f"reason{index}": 1 for index in range(500)})
    metrics.add_heartbeat(many)

    samples = read(metrics)
    assert len(samples) <= num_before + 30
    assert "evil" not in names(samples)
    assert value(samples, "request_errors_total", reason="other") >= 499
    assert value(samples, "tenant_requests_total", tenant="other", outcome="error") == 500
    assert total(samples, "records_dropped_total") >= 500


def test_methods_of_a_gateway_are_listed_if_there_is_one() -> None:
    method = "acme.v1.Gateway/Generate"
    without, with_it = service_metrics(), service_metrics(methods=(*REQUEST_METHODS, method))
    for metrics in (without, with_it):
        metrics.add_heartbeat(heartbeat(1, outcome(2, method=method)))

    found = {"code": "OK", "reason": "none", "finish_reason": "STOP"}
    assert value(read(with_it), "requests_total", method=method, **found) == 2
    assert value(read(without), "requests_total", method="other", **found) == 2


def test_tenants_are_reported_only_if_configured() -> None:
    without, with_two = service_metrics(), service_metrics(tenants=("atlas", "borealis"))
    reported = record(
        Segment(SegmentKind.QUEUE, 100.0, 100.5),
        tenant="atlas",
        num_prompt_tokens=8,
        num_completion_tokens=3,
    )

    for metrics in (without, with_two):
        metrics.add_records([reported])

    assert not any("tenant" in name for name in names(read(without)))
    samples = read(with_two)
    assert value(samples, "tenant_requests_total", tenant="atlas", outcome="ok") == 1
    assert value(samples, "tenant_generation_tokens_total", tenant="atlas") == 3
    assert value(samples, "tenant_prompt_tokens_total", tenant="borealis") == 0
    assert value(samples, "tenant_queue_seconds_total", tenant="atlas") == 0.5


def test_lost_traces_and_processes_are_queried_at_collection() -> None:
    counts = {"traces_dropped_queue_full": 1, "spans_dropped_queue_full": 1}
    metrics = service_metrics(
        trace_counts=lambda: counts, processes=lambda: {"engine": os.getpid(), "front": 2**22 + 1}
    )
    read(metrics)
    counts["traces_dropped_queue_full"] = 4

    samples = read(metrics)

    assert value(samples, "trace_dropped_total", reason="queue_full") == 5
    assert value(samples, "trace_dropped_total", reason="export") == 0
    assert value(samples, "process_resident_memory_bytes", process="engine") > 1e6
    assert value(samples, "process_cpu_seconds_total", process="engine") > 0
    assert ("penstock_process_resident_memory_bytes", frozenset({"process=front"})) not in samples


def test_traces_and_spans_are_counted_apart() -> None:
    counts = {
        "traces_kept": 4,
        "traces_sampled_out": 90,
        "traces_dropped_queue_full": 2,
        "traces_dropped_closing": 1,
        "spans_exported": 24,
        "spans_dropped_export": 6,
    }
    metrics = service_metrics(trace_counts=lambda: counts)
    read(metrics)
    counts["traces_kept"] = 5

    samples = read(metrics)

    assert value(samples, "traces_total", outcome="kept") == 5
    assert value(samples, "traces_total", outcome="sampled_out") == 90
    assert value(samples, "traces_total", outcome="dropped") == 3
    assert value(samples, "spans_total", outcome="exported") == 24
    assert value(samples, "spans_total", outcome="dropped") == 6


def test_every_metric_of_the_catalogue_can_be_reported() -> None:
    metrics = service_metrics(tenants=("atlas",), processes=lambda: {"engine": os.getpid()})
    reported = names(read(metrics))
    for spec in CATALOGUE:
        name = f"{spec.name}_count" if spec.buckets else spec.name
        assert name in reported, name
