"""Reports of fronts and engines for tests of metrics, and a metrics server with its samples."""

from __future__ import annotations

import http.client
import math
import socket
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from penstock.scheduler.executor import ExecutorInfo
from penstock.server.link.frames import EngineHello
from penstock.server.observe.flight.layout import STEP
from penstock.server.observe.frames import Heartbeat, OutcomeCount
from penstock.server.observe.metrics.application import status_json
from penstock.server.observe.metrics.exposition import Exposition
from penstock.server.observe.metrics.http import MetricsServer
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from penstock.server.observe.operations.snapshot import (
    CacheSnapshot,
    FrontSnapshot,
    ModelSnapshot,
    Percentiles,
    RequestView,
    Snapshot,
)
from penstock.server.observe.request_record import (
    RequestOptions,
    RequestRecord,
    Segment,
    TraceParent,
)

# What fronts and engines report, for tests of metrics: records, beats and steps with every
# default that a test does not care about, and the figures as Prometheus would read them.

GENERATE = "penstock.v1.GenerationService/Generate"


def engine_hello(epoch: int = 1, num_blocks: int = 40) -> EngineHello:
    info = ExecutorInfo(
        name="fake",
        vocab_size=100,
        block_size=16,
        num_blocks=num_blocks,
        max_seq_len=64,
        max_num_seqs=8,
    )
    return EngineHello(
        epoch=epoch, model="m", executor=info, max_num_waiting=8, max_num_waiting_tokens=800
    )


def outcome(num: int = 1, **settings: Any) -> OutcomeCount:
    defaults: dict[str, Any] = {
        "method": GENERATE,
        "code": 0,
        "reason": "",
        "finish_reason": "STOP",
    }
    return OutcomeCount(**{**defaults, **settings}, num=num)


def beat(front_id: int = 1, *outcomes: OutcomeCount, **settings: Any) -> Heartbeat:
    defaults: dict[str, Any] = {
        "pid": 100 + front_id,
        "epoch": 1,
        "is_draining": False,
        "is_engine_up": True,
        "num_streams": 0,
        "num_live": 0,
        "num_backlog_tokens": 0,
        "num_submitted": 0,
        "num_cut_readers": 0,
        "num_late_events": 0,
        "num_unknown_fields": 0,
        "num_internal_errors": 0,
        "num_records": 0,
    }
    return Heartbeat(front_id=front_id, outcomes=outcomes, **{**defaults, **settings})


def record(*segments: Segment, **settings: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "sequence": 0,
        "front_id": 1,
        "request_id": "r",
        "method": GENERATE,
        "model": "demo",
        "tenant": "",
        "peer": "ipv4:127.0.0.1:5",
        "trace": TraceParent(b"t" * 16, b"s" * 8),
        "arrival_s": 100.0,
        "end_s": 101.0,
        "code": 0,
        "reason": "",
        "finish_reasons": ("STOP",),
        "options": RequestOptions(),
        "num_prompt_tokens": 0,
        "num_cached_tokens": 0,
        "num_completion_tokens": 0,
        "ttft_s": math.nan,
        "num_ahead": -1,
        "estimated_queue_s": math.nan,
        "num_preemptions": 0,
        "num_messages": 0,
        "stalled_s": 0.0,
        "num_stalls": 0,
    }
    return RequestRecord(segments=segments, **{**defaults, **settings})


def steps(*rows: dict[str, Any]) -> NDArray[Any]:
    """Return rows of STEP; a step takes 8 ms and 1 ms more of planning unless overridden."""
    array = np.zeros(len(rows), dtype=STEP)
    for index, row in enumerate(rows):
        begun_s = 10.0 + index
        defaults = {
            "step": index,
            "begun_s": begun_s,
            "launched_s": begun_s + 2**-11,
            "collected_s": begun_s + 2**-11 + 2**-7,
            "updated_s": begun_s + 2**-10 + 2**-7,
            "itl_s": math.nan,
            "predicted_s": math.nan,
        }
        for name, value in {**defaults, **row}.items():
            array[name][index] = value
    return array


def read(metrics: ServiceMetrics, compat: str = "") -> dict[tuple[str, frozenset[str]], float]:
    """Return every sample by its name and its labels as `name=value`, without the model label."""
    text, _ = Exposition(metrics).render("", compat)
    return samples_of(text.decode())


def samples_of(text: str) -> dict[tuple[str, frozenset[str]], float]:
    samples: dict[tuple[str, frozenset[str]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(
                f"{name}={value}"
                for name, value in sample.labels.items()
                if name not in ("model", "model_name", "engine_type", "gen_ai_request_model")
            )
            assert (sample.name, labels) not in samples
            samples[sample.name, labels] = sample.value
    return samples


def value(samples: dict[tuple[str, frozenset[str]], float], name: str, **labels: str) -> float:
    return samples[f"penstock_{name}", frozenset(f"{k}={v}" for k, v in labels.items())]


def total(samples: dict[tuple[str, frozenset[str]], float], name: str) -> float:
    """Return the sum over all series of a name."""
    return sum(v for (found, _), v in samples.items() if found == f"penstock_{name}")


def names(samples: Iterable[tuple[str, frozenset[str]]]) -> set[str]:
    return {name for name, _ in samples}


def request_view(**settings: Any) -> RequestView:
    defaults: dict[str, Any] = {
        "request_id": "chat-1",
        "model": "demo",
        "tenant": "atlas",
        "state": "PROCESSING",
        "phase": "decode",
        "waits_for": "",
        "queue_position": None,
        "priority": 0,
        "arrival_s": 1.79e9,
        "age_s": 2.5,
        "num_prompt_tokens": 812,
        "num_cached_tokens": 512,
        "num_output_tokens": 64,
        "num_computed_tokens": 876,
        "num_blocks": 55,
        "num_preemptions": 0,
        "num_backlog_tokens": 0,
        "time_to_deadline_s": None,
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    }
    return RequestView(**{**defaults, **settings})


def snapshot(time_s: float = 1.79e9, **settings: Any) -> Snapshot:
    defaults: dict[str, Any] = {
        "model": "demo",
        "is_up": True,
        "epoch": 1,
        "num_pending": 3,
        "num_processing": 61,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "cache": CacheSnapshot(
            block_size_tokens=16,
            num_total_blocks=4096,
            num_used_blocks=2700,
            num_cached_blocks=900,
            num_free_blocks=496,
        ),
        "num_completed": 18230,
        "num_cancelled": 211,
        "num_failed": 3,
        "num_steps": 99123,
        "num_prompt_tokens": 9_120_000,
        "num_cached_prompt_tokens": 5_400_000,
        "num_completion_tokens": 2_300_000,
        "prefill_tokens_per_s": 21500.0,
        "decode_tokens_per_s": 7420.0,
        "mean_step_s": 0.0083,
        "estimated_queue_s": 0.4,
        "ttft": Percentiles(p50_s=0.041, p90_s=0.12, p99_s=0.6, num=812),
        "itl": Percentiles(p50_s=0.0081, p90_s=0.0093, p99_s=0.021, num=445_000),
        "queue": Percentiles(p50_s=0.004, p90_s=0.08, p99_s=0.51, num=812),
        "e2e": Percentiles(p50_s=1.2, p90_s=3.4, p99_s=8.8, num=790),
        "waits_for": "BLOCKS",
    }
    model = ModelSnapshot(**{**defaults, **settings})
    front = FrontSnapshot(index=0, pid=101, num_streams=64, num_live=64, num_backlog_tokens=0)
    return Snapshot(
        time_s=time_s, uptime_s=7384.0, is_draining=False, models=(model,), fronts=(front,)
    )


# A metrics server of a test, by a clock of the test.

PATIENCE_S = 60.0


class House:
    """A server on a free port, and calls to it."""

    def __init__(self) -> None:
        self.metrics = ServiceMetrics(model='de"mo\\')
        self.status: Callable[[], bytes] = lambda: status_json(snapshot(), (request_view(),))
        self.now_s = 0.0
        self.server = MetricsServer(
            host="127.0.0.1",
            port=0,
            metrics=self.metrics,
            status=lambda: self.status(),
            clock=lambda: self.now_s,
        )
        self.server.start()

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE_S)
