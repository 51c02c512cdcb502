"""Metrics as Prometheus would read them, and a metrics server with a clock that the test sets."""

import http.client
import socket
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from penstock.server.observe.metrics.application import status_json
from penstock.server.observe.metrics.exposition import Exposition
from penstock.server.observe.metrics.http import MetricsServer
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from penstock.server.rpc.service_names import REQUEST_METHODS
from support.snapshots import request_view, snapshot
from support.timeout import TEST_TIMEOUT_S


def service_metrics(**settings: Any) -> ServiceMetrics:
    return ServiceMetrics(**{"model": "demo", "methods": REQUEST_METHODS, **settings})


def read(metrics: ServiceMetrics, compat: str = "") -> dict[tuple[str, frozenset[str]], float]:
    """Return the value of every sample, by its name and its labels in the form `name=value`; the
    labels of the model and the engine are omitted.
    """
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
    return sum(v for (found, _), v in samples.items() if found == f"penstock_{name}")


def names(samples: Iterable[tuple[str, frozenset[str]]]) -> set[str]:
    return {name for name, _ in samples}


class Harness:
    """A metrics server on a free port, and HTTP calls to it."""

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
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.server.port, timeout=TEST_TIMEOUT_S
        )
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=TEST_TIMEOUT_S)
