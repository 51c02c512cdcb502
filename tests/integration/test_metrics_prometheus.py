"""A real Prometheus scrapes the metrics port; the dashboard's every query has data there."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.scheduler.events import Wait
from penstock.server.metrics.http import MetricsServer
from penstock.server.metrics.service_metrics import ServiceMetrics
from penstock.server.metrics.step_metrics import EngineShape
from penstock.server.telemetry.request_record import Segment, SegmentKind
from support.dashboards import RULES, dashboard_queries, without_variables
from support.metric_tellings import beat, outcome, record, steps

PATIENCE_S = 60.0
_PAUSE_S = 0.25


class Prometheus:
    """One that scrapes `target_port` four times a second."""

    def __init__(self, home: Path, target_port: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        config = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "penstock",
                    "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
                }
            ],
        }
        # JSON is YAML.
        (home / "prometheus.yaml").write_text(json.dumps(config))
        executable = shutil.which("prometheus")
        assert executable is not None
        self._log = (home / "log").open("wb")
        self._process = subprocess.Popen(
            [
                executable,
                f"--config.file={home / 'prometheus.yaml'}",
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an API call; None while it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
            answer = json.loads(connection.getresponse().read())
        except (ConnectionError, json.JSONDecodeError):
            return None
        finally:
            connection.close()
        assert answer.get("status") == "success", answer
        return answer["data"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()


class Traffic:
    """Tells a little more of everything each time."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics
        self._num = 0
        metrics.take_engine(
            EngineShape(epoch=1, block_size_tokens=16, num_blocks=40, max_num_seqs=8)
        )

    def go_on(self) -> None:
        self._num += 1
        num = self._num
        self._metrics.take_beat(
            beat(
                1,
                outcome(9 * num),
                outcome(num, code=8, reason="QUEUE_FULL", finish_reason=""),
                outcome(num, code=13, reason="INTERNAL", finish_reason=""),
                epoch=1 + num // 4,
                loop_lag_s=(0.001,),
                num_streams=3,
                num_submitted=9 * num,
                num_records=9 * num,
            )
        )
        row = {
            "itl_s": 0.004, "num_itl": 7, "num_tokens": 8, "num_decodes": 7, "num_admitted": 2,
            "num_prefill_tokens": 30, "num_prefill_rows": 1, "num_preempted": 1, "num_running": 7,
            "num_used_blocks": 30, "num_free_blocks": 10, "waits_for": 1, "predicted_s": 0.009,
        }  # fmt: skip
        self._metrics.take_steps(1 + num // 4, steps(row, row), 0)
        told = record(
            Segment(SegmentKind.PREPARE, 100.0, 100.1),
            Segment(SegmentKind.QUEUE, 100.1, 100.3, wait=Wait(blocks_s=0.2)),
            Segment(SegmentKind.PREFILL, 100.3, 100.5),
            Segment(SegmentKind.DECODE, 100.5, 100.9),
            Segment(SegmentKind.DELIVER, 100.9, 101.0),
            ttft_s=0.5,
            tenant="atlas",
            num_prompt_tokens=32,
            num_cached_tokens=16,
            num_completion_tokens=8,
            num_stalls=1,
        )
        self._metrics.take_records([told])


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[tuple[Traffic, Prometheus]]:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed")
    own = {"engine": 1}
    metrics = ServiceMetrics(model="demo", version="1", tenants=("atlas",), processes=lambda: own)
    server = MetricsServer(host="127.0.0.1", port=0, metrics=metrics, status=bytes)
    server.start()
    prometheus = Prometheus(tmp_path, server.port)
    yield Traffic(metrics), prometheus
    prometheus.close()
    server.close()


def test_every_query_of_the_dashboard_has_data(scraped: tuple[Traffic, Prometheus]) -> None:
    traffic, prometheus = scraped
    wanted = {name: without_variables(query) for name, query in dashboard_queries().items()}
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / _PAUSE_S)):
        traffic.go_on()
        # Prometheus has no way to say that it has scraped.
        pause.wait(_PAUSE_S)
        for name, query in list(wanted.items()):
            answer = prometheus.ask("query", query=query)
            if answer is None or not answer["result"]:
                break
            del wanted[name]
        if not wanted:
            break

    assert wanted == {}
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert target["health"] == "up", target["lastError"]
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert rules
    assert all(rule["health"] in ("ok", "unknown") for rule in rules)
