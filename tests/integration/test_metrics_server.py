"""The metrics port answers scrapes and serves its page, over real sockets."""

from __future__ import annotations

import gzip
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from penstock.server.observe.metrics.application import MAX_STATUS_CALLS
from penstock.server.observe.metrics.exposition import COMPAT_NAMES
from penstock.server.observe.metrics.http import MetricsServer
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from penstock.server.observe.operations.snapshot import OperationsError
from support.metric_samples import Harness, samples_of
from support.reports import heartbeat, outcome, record, steps
from support.timeout import TEST_TIMEOUT_S


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.server.close()


def fill(metrics: ServiceMetrics) -> None:
    metrics.add_records([record(ttft_s=0.25, num_completion_tokens=5)])
    metrics.add_heartbeat(
        heartbeat(1, outcome(3), loop_lag_s=(0.001, 0.002), dropped_records={"full": 1})
    )
    metrics.add_steps(1, steps({"itl_s": 0.004, "num_itl": 7, "num_used_blocks": 3}), 0)


def test_a_scrape(harness: Harness) -> None:
    fill(harness.metrics)

    status, headers, body = harness.ask("/metrics")

    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = samples_of(body.decode())
    assert sum(v for (name, _), v in samples.items() if name == "penstock_requests_total") == 3
    assert samples["penstock_inter_token_latency_seconds_count", frozenset()] == 7
    assert any(name == "process_resident_memory_bytes" for name, _ in samples)
    assert any(name == "python_info" for name, _ in samples)


@pytest.mark.parametrize("compat", ["", *COMPAT_NAMES])
@pytest.mark.parametrize("is_filled", [False, True])
def test_promtool_reports_no_problem(harness: Harness, compat: str, is_filled: bool) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    if is_filled:
        fill(harness.metrics)

    _, _, body = harness.ask(f"/metrics?compat={compat}" if compat else "/metrics")

    linted = subprocess.run(
        [promtool, "check", "metrics"], input=body, capture_output=True, timeout=60, check=False
    )
    assert linted.returncode == 0, (linted.stdout + linted.stderr).decode()


def test_formats_and_compression_are_negotiated(harness: Harness) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}

    status, headers, body = harness.ask("/metrics", headers=accept)

    assert status == 200
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body).endswith(b"# EOF\n")
    _, headers, _ = harness.ask("/metrics", headers={"Accept-Encoding": "gzip;q=0, deflate"})
    assert headers["Content-Encoding"] is None


def test_gateway_gauges_exist_from_the_start(harness: Harness) -> None:
    _, _, body = harness.ask("/metrics")
    text, samples = body.decode(), samples_of(body.decode())

    for name in (
        "penstock_num_requests_waiting",
        "penstock_num_requests_running",
        "penstock_kv_cache_usage_ratio",
        "penstock_kv_cache_block_size_tokens",
        "penstock_kv_cache_total_blocks",
    ):
        assert samples[name, frozenset()] == 0
        assert f"# TYPE {name} gauge" in text


def test_the_page_and_its_parts(harness: Harness) -> None:
    for path, kind in {
        "/": "text/html",
        "/page.css": "text/css",
        "/page.js": "text/javascript",
        "/charts.js": "text/javascript",
        "/icon.svg": "image/svg+xml",
        "/status.json": "application/json",
        "/healthz": "text/plain",
    }.items():
        status, headers, body = harness.ask(path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Server"].strip() == "penstock"
        assert b"https://" not in body
        bare = harness.ask(path, "HEAD")
        assert (bare[0], bare[2]) == (200, b"")
        assert bare[1]["Content-Length"] == headers["Content-Length"]
    assert harness.ask("/status.json")[1]["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/../http.py", "/page", "/index.html", "/metrics/", "/%2e%2e/x"]
)
def test_other_paths_are_not_found(harness: Harness, path: str) -> None:
    assert harness.ask(path)[0] == 404


def test_methods_other_than_get_and_head_are_rejected(harness: Harness) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, headers, _ = harness.ask("/metrics", method)
        assert status == 405
        assert headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/metrics?compat=vllm", b"compat must be one of trtllm, gen_ai"),
        ("/metrics?compat=", b"compat must not be empty"),
        ("/metrics?compat=trtllm&compat=gen_ai", b"duplicate parameter compat"),
        ("/metrics?name[]=up", b"unknown query parameter 'name[]'"),
        ("/?x=%3Cscript%3E", b"unknown query parameter"),
    ],
)
def test_invalid_queries_are_rejected(harness: Harness, path: str, message: bytes) -> None:
    status, headers, body = harness.ask(path)
    assert status == 400
    assert message in body
    assert headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize("error", [OperationsError("secret"), TimeoutError("secret")])
def test_a_missing_status_is_reported_as_missing(harness: Harness, error: Exception) -> None:
    def fail() -> bytes:
        raise error

    harness.status = fail
    status, headers, body = harness.ask("/status.json")
    assert (status, headers["Cache-Control"]) == (503, "no-store")
    assert b"secret" not in body
    assert harness.ask("/metrics")[0] == 200


def test_a_slow_status_does_not_block_scrapes(harness: Harness) -> None:
    asked, proceed = threading.Semaphore(0), threading.Event()

    def slow() -> bytes:
        asked.release()
        assert proceed.wait(TEST_TIMEOUT_S)
        return b"{}"

    harness.status = slow
    answers: list[int] = []
    askers = [
        threading.Thread(target=lambda: answers.append(harness.ask("/status.json")[0]))
        for _ in range(MAX_STATUS_CALLS)
    ]
    for asker in askers:
        asker.start()
    for _ in askers:
        assert asked.acquire(timeout=TEST_TIMEOUT_S)

    assert harness.ask("/status.json")[0] == 503
    assert harness.ask("/metrics")[0] == 200
    proceed.set()
    for asker in askers:
        asker.join(TEST_TIMEOUT_S)
    assert answers == [200] * MAX_STATUS_CALLS


@pytest.mark.parametrize(
    "noise",
    [b"\x00\xff" * 50 + b"\r\n\r\n", b"GET " + b"/" * 70000 + b" HTTP/1.1\r\n\r\n", b"\r\n"],
)
def test_invalid_http_does_not_stop_the_server(harness: Harness, noise: bytes) -> None:
    with harness.connect() as connection:
        try:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(4096)
        except ConnectionError:
            pass
    assert harness.ask("/healthz")[0] == 200


def test_a_port_in_use_is_reported_when_the_server_is_made(harness: Harness) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(
            host="127.0.0.1", port=harness.server.port, metrics=harness.metrics, status=bytes
        )


def test_the_server_can_be_closed_before_its_start_and_twice() -> None:
    server = MetricsServer(
        host="127.0.0.1", port=0, metrics=ServiceMetrics(model="demo"), status=bytes
    )
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=TEST_TIMEOUT_S)


def test_scrapes_during_many_records_are_complete(harness: Harness) -> None:
    stop = threading.Event()
    rows = steps(*({"itl_s": 0.004, "num_itl": 3, "num_tokens": 3} for _ in range(16)))

    def report_steps() -> None:
        while not stop.is_set():
            harness.metrics.add_steps(1, rows, 0)

    reporter = threading.Thread(target=report_steps)
    reporter.start()
    try:
        for _ in range(20):
            samples = samples_of(harness.ask("/metrics")[2].decode())
            num = samples["penstock_generation_tokens_total", frozenset()]
            assert num == samples["penstock_inter_token_latency_seconds_count", frozenset()]
            assert num == 3 * samples["penstock_step_seconds_count", frozenset()]
    finally:
        stop.set()
        reporter.join(TEST_TIMEOUT_S)
