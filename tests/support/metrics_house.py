"""A metrics server of a test, by a clock of the test."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable

from penstock.server.observe.metrics.application import status_json
from penstock.server.observe.metrics.http import MetricsServer
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from support.metric_tellings import request_view, snapshot

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
