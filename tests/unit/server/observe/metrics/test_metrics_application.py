"""Who may read the metrics port, and what the JSON of its status page contains."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from penstock.server.observe.metrics.application import (
    MAX_AGE_S,
    MAX_REQUESTS,
    LiveStatus,
    MetricsAccess,
    MetricsApplication,
    status_json,
)
from penstock.server.observe.metrics.exposition import Exposition
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from penstock.server.observe.operations.service import Operations
from penstock.server.observe.operations.snapshot import (
    OperationsError,
    PhaseChange,
    RequestView,
    Snapshot,
)
from support.security_files import ACME, OPERATOR, SecurityFiles
from support.snapshots import request_view, snapshot


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
    authenticator = SecurityFiles(tmp_path).tokens().authenticator
    assert authenticator is not None
    return MetricsApplication(
        Exposition(ServiceMetrics(model="m")),
        lambda: b"{}",
        is_local=False,
        access=MetricsAccess(authenticator),
    )


@pytest.mark.parametrize("path", ["/metrics", "/", "/status.json", "/page.js"])
def test_all_paths_except_probes_require_the_operator_right(
    app: MetricsApplication, path: str
) -> None:
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


def test_the_keys_are_those_of_the_snapshot() -> None:
    history = (PhaseChange(phase="queue", since_s=5.0),)
    reported = json.loads(status_json(snapshot(), (request_view(history=history),)))

    assert reported["models"][0]["cache"]["num_used_blocks"] == 40
    assert reported["models"][0]["ttft"] == {"p50_s": 0.05, "p90_s": 0.1, "p99_s": 0.2, "num": 11}
    assert reported["fronts"][0]["pid"] == 4001
    assert reported["requests"][0]["request_id"] == "request-1"
    assert reported["requests"][0]["history"] == [{"phase": "queue", "since_s": 5.0}]
    assert reported["num_requests"] == 1
    assert reported["requests_problem"] == ""


def test_numbers_that_are_not_finite_are_null() -> None:
    reported = json.loads(
        status_json(snapshot(mean_step_s=math.nan), (request_view(time_to_deadline_s=math.inf),))
    )

    assert reported["models"][0]["mean_step_s"] is None
    assert reported["requests"][0]["time_to_deadline_s"] is None


def test_the_status_json_is_safe_within_markup_and_bounded() -> None:
    views = tuple(request_view(request_id="</script>ü\u2028") for _ in range(MAX_REQUESTS + 1))
    text = status_json(snapshot(), views)

    assert b"<" not in text
    reported = json.loads(text)
    assert reported["requests"][0]["request_id"] == "</script>ü\u2028"
    assert (len(reported["requests"]), reported["num_requests"]) == (MAX_REQUESTS, MAX_REQUESTS + 1)


class FakeOperations(Operations):
    """Counts the calls of `live_requests`, which raises OperationsError if `problem` is set."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.problem = ""

    def snapshot(self) -> Snapshot:
        return snapshot()

    async def live_requests(self) -> tuple[RequestView, ...]:
        self.num_asked += 1
        if self.problem:
            raise OperationsError(self.problem)
        return (request_view(),)


async def test_many_status_requests_cause_few_queries() -> None:
    fake, now = FakeOperations(), [0.0]
    status = LiveStatus(fake, asyncio.get_running_loop(), clock=lambda: now[0])

    answers = await asyncio.gather(*(asyncio.to_thread(status) for _ in range(8)))
    assert len(set(answers)) == 1
    assert fake.num_asked == 1
    now[0] += MAX_AGE_S + 0.01
    await asyncio.to_thread(status)
    assert fake.num_asked == 2


async def test_a_service_without_its_engine_still_has_a_status() -> None:
    fake = FakeOperations()
    fake.problem = "the engine is down"

    reported = json.loads(await asyncio.to_thread(LiveStatus(fake, asyncio.get_running_loop())))

    assert reported["requests"] == []
    assert reported["requests_problem"] == "the engine is down"
    assert reported["models"][0]["model"] == "tiny"


def test_after_the_end_of_the_event_loop_the_status_is_unavailable() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError):
        LiveStatus(FakeOperations(), loop)()
