"""A real Prometheus scrapes the metrics port; every query of the dashboard returns data."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.scheduler.events import Wait
from penstock.server.observe.metrics.http import MetricsServer
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from penstock.server.observe.request_record import Segment, SegmentKind
from support.dashboards import RULES, dashboard_queries, without_variables
from support.ports import reusable_port
from support.reports import engine_hello, heartbeat, outcome, record, steps
from support.service import Service, simulated, started
from support.timeout import TEST_TIMEOUT_S

# A real Prometheus that scrapes a port of this machine, and its API.

_PAUSE_S = 0.25


def shown_queries() -> dict[str, str]:
    """Return the dashboard's queries as Grafana sends them, by name."""
    return {name: without_variables(query) for name, query in dashboard_queries().items()}


class Prometheus:
    """A Prometheus server that scrapes `target_port` once a second."""

    def __init__(self, home: Path, target_port: int) -> None:
        executable = shutil.which("prometheus")
        if executable is None:
            pytest.skip("Prometheus is not installed")
        self.port = reusable_port()
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "penstock",
                    "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
                }
            ],
        }
        # JSON is valid YAML.
        (home / "prometheus.yaml").write_text(json.dumps(config))
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
        """Return the data of an API call; None while the server does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TEST_TIMEOUT_S)
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
        self._process.wait(TEST_TIMEOUT_S)
        self._log.close()

    def has_data(self, query: str) -> bool:
        answer = self.ask("query", query=query)
        return answer is not None and any(
            series["value"][1] != "NaN" for series in answer["result"]
        )

    def until_data(
        self, queries: dict[str, str], proceed: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Call `proceed` and evaluate the queries repeatedly until all have data, or until the time
        limit; return the queries without data.
        """
        pause = threading.Event()
        missing = queries
        for _ in range(int(TEST_TIMEOUT_S / _PAUSE_S)):
            proceed()
            # Prometheus does not report when it has scraped.
            pause.wait(_PAUSE_S)
            missing = {name: query for name, query in queries.items() if not self.has_data(query)}
            if not missing:
                break
        return missing

    def check_health(self) -> None:
        # On a busy machine a scrape may exceed its time limit.
        assert self.until_data({"health": "up == 1"}) == {}, self.ask("targets")
        rules = [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]
        assert rules
        assert [rule for rule in rules if rule["health"] not in ("ok", "unknown")] == []


class Traffic:
    """Increases the service's metrics with each call of `proceed`."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics
        self._num = 0
        metrics.set_engine(engine_hello())

    def proceed(self) -> None:
        self._num += 1
        num = self._num
        self._metrics.add_heartbeat(
            heartbeat(
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
        self._metrics.add_steps(1 + num // 4, steps(row, row), 0)
        reported = record(
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
        self._metrics.add_records([reported])


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[tuple[Traffic, Prometheus]]:
    own = {"engine": 1}
    metrics = ServiceMetrics(model="demo", version="1", tenants=("atlas",), processes=lambda: own)
    server = MetricsServer(host="127.0.0.1", port=0, metrics=metrics, status=bytes)
    server.start()
    try:
        with contextlib.closing(Prometheus(tmp_path, server.port)) as prometheus:
            yield Traffic(metrics), prometheus
    finally:
        server.close()


def test_every_query_of_the_dashboard_has_data(scraped: tuple[Traffic, Prometheus]) -> None:
    traffic, prometheus = scraped

    assert prometheus.until_data(shown_queries(), traffic.proceed) == {}
    prometheus.check_health()


@contextlib.asynccontextmanager
async def loaded(service: Service) -> AsyncGenerator[None]:
    """Overload the service during the block: a `penstock bench` sends more concurrent requests than
    the service can run.
    """
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.tools", "bench", service.address),
        *("--concurrency", "24", "--duration-s", str(TEST_TIMEOUT_S), "--no-progress"),
        *("--prompt-tokens", "uniform:8:64", "--output-tokens", "uniform:2:40"),
        *("--tenant", "atlas", "--tenant-metadata-key", "x-tenant"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
        assert bench.returncode is None, "it ended before its time"
    finally:
        if bench.returncode is None:
            bench.terminate()
        await bench.wait()


MOVED = (
    'penstock_requests_total{code="OK"}',
    'penstock_admission_rejected_total{reason="QUEUE_FULL"}',
    'penstock_request_errors_total{reason="ENGINE_DOWN"}',
    'penstock_queue_wait_seconds_total{reason="blocks"}',
    "penstock_preemptions_total",
    'penstock_tenant_generation_tokens_total{tenant="atlas"}',
)
"""Metrics that must be non-zero, or the other queries prove nothing."""


@pytest.mark.nightly
async def test_every_query_has_data_for_a_service_under_load(tmp_path: Path) -> None:
    """Under the load, requests wait, are preempted and are rejected, and an engine is killed."""
    arguments = (
        *simulated(),
        *("--fronts", "2", "--metrics-port", "0", "--num-blocks", "24", "--max-num-seqs", "8"),
        *("--max-num-waiting", "12", "--tenant-metadata-key", "x-tenant"),
        *("--metrics-tenants", "atlas", "--admission-policy", "max_utilization"),
    )
    async with started(*arguments) as service:
        port = int((await service.printed_address("metrics")).rpartition(":")[2].partition("/")[0])
        with contextlib.closing(await asyncio.to_thread(Prometheus, tmp_path, port)) as prometheus:
            async with loaded(service):
                serves = {"serves": "penstock_generation_tokens_total > 0"}
                assert await asyncio.to_thread(prometheus.until_data, serves) == {}
                os.kill(await service.next_pid("engine"), signal.SIGKILL)
                wanted = shown_queries() | {name: f"{name} > 0" for name in MOVED}
                assert await asyncio.to_thread(prometheus.until_data, wanted) == {}
            await asyncio.to_thread(prometheus.check_health)
