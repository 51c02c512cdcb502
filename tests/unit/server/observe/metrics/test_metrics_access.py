"""Access to the metrics port when other machines can reach it."""

from __future__ import annotations

import io
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from penstock.server.observe.metrics.application import MetricsAccess, MetricsApplication
from penstock.server.observe.metrics.exposition import Exposition
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from support.guarded import ACME, OPERATOR, Premises


def answer(app: MetricsApplication, path: str, authorization: str | None) -> tuple[int, Any]:
    seen: list[Any] = []

    def start(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], object]:
        seen.append((int(status.split()[0]), dict(headers)))
        return io.BytesIO().write

    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "HTTP_HOST": "penstock.test"}
    if authorization is not None:
        environ["HTTP_AUTHORIZATION"] = authorization
    app(environ, start)
    status, headers = seen[0]
    return status, headers


@pytest.fixture
def app(tmp_path: Path) -> MetricsApplication:
    authenticator = Premises(tmp_path).tokens().authenticator
    assert authenticator is not None
    return MetricsApplication(
        Exposition(ServiceMetrics(model="m")),
        lambda: b"{}",
        is_local=False,
        access=MetricsAccess(authenticator),
    )


@pytest.mark.parametrize("path", ["/metrics", "/", "/status.json", "/page.js"])
def test_all_but_probes_need_the_right_to(app: MetricsApplication, path: str) -> None:
    for authorization, status in (
        (None, HTTPStatus.UNAUTHORIZED),
        ("Bearer wrong", HTTPStatus.UNAUTHORIZED),
        (f"Basic {OPERATOR}", HTTPStatus.UNAUTHORIZED),
        (f"Bearer {ACME}", HTTPStatus.FORBIDDEN),
        (f"Bearer {OPERATOR}", HTTPStatus.OK),
    ):
        found, headers = answer(app, path, authorization)
        assert found == status
        assert ("WWW-Authenticate" in headers) == (status != HTTPStatus.OK)


def test_probes_have_no_credentials(app: MetricsApplication) -> None:
    assert answer(app, "/healthz", None)[0] == HTTPStatus.OK
