"""A service that is watched as in production: a collector for its traces, Prometheus, operators.

Owns the processes and where they are. Everything is on 127.0.0.1, and ends with the block that
started it. Used for the pictures of docs/why-is-it-slow.md.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from picture_trace import SeenSpan
from simulated_service import PATIENCE_S, RunFailed, free_port
from tracing_peers import EXPORT_SERVICE

_ENGINE = "penstock.server.processes.engine_process"
_POLL_S = 0.1
_OF_TARGET = ("__name__", "instance", "job", "model")


@dataclass(slots=True)
class Collector:
    """Keeps the spans that it is sent."""

    endpoint: str = ""
    _payloads: list[bytes] = field(default_factory=list[bytes])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def export(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """One call of an exporter."""
        del context
        with self._lock:
            self._payloads.append(data)
        return b""

    def spans(self) -> list[SeenSpan]:
        """All that came."""
        with self._lock:
            payloads = list(self._payloads)
        return [span for payload in payloads for span in _spans(payload)]


class Prometheus:
    """A real one that scrapes `target_port` four times a second. Raises RunFailed without one."""

    def __init__(self, home: Path, target_port: int) -> None:
        executable = shutil.which("prometheus")
        if executable is None:
            raise RunFailed("Prometheus is not installed")
        home.mkdir()
        self._port = free_port()
        config = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
            "scrape_configs": [
                {
                    "job_name": "penstock",
                    "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
                }
            ],
        }
        # JSON is YAML.
        (home / "prometheus.yaml").write_text(json.dumps(config))
        self._process = subprocess.Popen(
            (
                *(executable, f"--config.file={home / 'prometheus.yaml'}", "--log.level=error"),
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            )
        )

    def ask(self, query: str) -> dict[str, float]:
        """What a query answers now, by its labels' values; empty where there is nothing."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            words = urllib.parse.urlencode({"query": query})
            connection.request("GET", f"/api/v1/query?{words}")
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if answer.get("status") != "success":
            raise RunFailed(f"{query}: {answer.get('error')}")
        data = answer["data"]
        if data["resultType"] == "scalar":
            return {"": float(data["result"][1])}
        return {
            " ".join(
                text for name, text in sorted(each["metric"].items()) if name not in _OF_TARGET
            ): float(each["value"][1])
            for each in data["result"]
        }

    def until_scraped(self) -> None:
        """Wait for the first scrape."""
        give_up_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(ConnectionError, json.JSONDecodeError):
                if 1.0 in self.ask("up").values():
                    return
            time.sleep(_POLL_S)
        raise RunFailed("Prometheus has scraped nothing")

    def close(self) -> None:
        """Ask it to end and wait."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A service that is ready, and who watches it. `flights`: where its records are written."""

    process: subprocess.Popen[bytes]
    port: int
    operations_port: int
    metrics_port: int
    collector: Collector
    prometheus: Prometheus
    flights: Path
    log: Path

    def engine_pid(self) -> int:
        """Raises RunFailed when there is none."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if _ENGINE in child.cmdline():
                    return child.pid
        raise RunFailed("there is no engine")

    def end(self) -> None:
        """Ask the service to end and wait: all its spans are at the collector then."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def site(options: Sequence[str], home: Path) -> Generator[Site]:
    """`penstock serve --executor simulated` with these options, watched. `home`: empty folder."""
    port, operations_port, metrics_port = free_port(), free_port(), free_port()
    log = home / "log"
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(_collector())
        command = (
            *(sys.executable, "-m", "penstock.tools", "serve", "--executor", "simulated"),
            *("--port", str(port), "--operations-port", str(operations_port)),
            *("--metrics-port", str(metrics_port), "--flight-folder", str(home / "flights")),
            *("--otlp-endpoint", collector.endpoint, "--fronts", "1", "--drain-grace-s", "2"),
            *options,
        )
        file = stack.enter_context(log.open("wb"))
        environment = {name: text for name, text in os.environ.items() if name[:5] != "OTEL_"}
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
            )
        )
        try:
            _until_ready(process, log)
            prometheus = Prometheus(home / "prometheus", metrics_port)
            stack.callback(prometheus.close)
            prometheus.until_scraped()
            there = Site(
                process=process,
                port=port,
                operations_port=operations_port,
                metrics_port=metrics_port,
                collector=collector,
                prometheus=prometheus,
                flights=home / "flights",
                log=log,
            )
            yield there
            there.end()
        finally:
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def _collector() -> Generator[Collector]:
    found = Collector()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(found.export)
    service = grpc.method_handlers_generic_handler(EXPORT_SERVICE, {"Export": handler})
    server.add_generic_rpc_handlers((service,))
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait()


def _until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    if select.select([process.stdout], [], [], PATIENCE_S)[0]:
        line = process.stdout.readline()
        if line.startswith(b"penstock ready"):
            return
    raise RunFailed(log.read_text(encoding="utf-8") or "the service did not start")


def _spans(payload: bytes) -> Iterator[SeenSpan]:
    for part in otlp.ExportTraceServiceRequest.FromString(payload).resource_spans:
        for scope in part.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    name=span.name,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                    attributes=_attributes(span.attributes),
                    events=tuple((each.name, each.time_unix_nano) for each in span.events),
                )


def _attributes(pairs: Sequence[common_pb2.KeyValue]) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind is not None and kind != "array_value":
            found[pair.key] = getattr(pair.value, kind)
    return found
