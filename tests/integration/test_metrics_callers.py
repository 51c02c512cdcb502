"""Which callers the metrics port serves and which it disconnects or rejects, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.server.observe.metrics.application import MetricsApplication
from penstock.server.observe.metrics.exposition import Exposition
from penstock.server.observe.metrics.http import (
    MAX_CALL_S,
    MAX_CALLS,
    MAX_OTHER_CALLS,
    MAX_PENDING,
    MAX_RECEIVE_S,
)
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from support.metric_samples import Harness
from support.timeout import TEST_TIMEOUT_S


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.server.close()


def test_clients_that_only_hold_connections_block_no_other(harness: Harness) -> None:
    holders = [harness.connect() for _ in range(MAX_PENDING - 1)]
    for holder in holders[::2]:  # the others send nothing
        holder.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
    try:
        for path in ("/metrics", "/", "/status.json", "/healthz"):
            assert harness.ask(path)[0] == 200
        harness.now_s += MAX_RECEIVE_S + 1
        for holder in holders:
            assert holder.recv(1) == b""
    finally:
        for holder in holders:
            holder.close()


def test_the_oldest_of_too_many_silent_connections_is_closed(harness: Harness) -> None:
    holders = [harness.connect() for _ in range(MAX_PENDING + 1)]
    try:
        assert holders[0].recv(1) == b""
        holders[-1].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert holders[-1].recv(12) == b"HTTP/1.0 200"
    finally:
        for holder in holders:
            holder.close()


class SlowScrapes:
    """Scrapes that have started and are not answered until `proceed` is set."""

    def __init__(self, harness: Harness, patch: pytest.MonkeyPatch) -> None:
        self.proceed = threading.Event()
        self._begun = threading.Semaphore(0)
        self._harness = harness
        self.callers: list[socket.socket] = []

        def render(exposition: Exposition, accept: str, compat: str) -> tuple[bytes, str]:
            del exposition, accept, compat
            self._begun.release()
            assert self.proceed.wait(TEST_TIMEOUT_S)
            return b"", "text/plain"

        patch.setattr(Exposition, "render", render)

    def begin(self, num: int) -> None:
        for _ in range(num):
            caller = self._harness.connect()
            self.callers.append(caller)
            caller.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert self._begun.acquire(timeout=TEST_TIMEOUT_S)


@pytest.fixture
def scrapes(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowScrapes]:
    made = SlowScrapes(harness, monkeypatch)
    yield made
    made.proceed.set()
    for caller in made.callers:
        caller.close()


def test_the_last_connections_are_reserved_for_scrapes(
    harness: Harness, scrapes: SlowScrapes
) -> None:
    scrapes.begin(MAX_OTHER_CALLS)

    for path in ("/", "/status.json", "/metrics/"):
        status, headers, body = harness.ask(path)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert headers["Server"] == "penstock"
        assert body == b"too many concurrent requests\n"
    assert harness.ask("/", "HEAD")[2] == b""
    assert harness.ask("/healthz")[0] == 200

    scrapes.begin(MAX_CALLS - MAX_OTHER_CALLS)
    assert harness.ask("/metrics")[0] == 503
    assert harness.ask("/healthz")[0] == 200

    scrapes.proceed.set()
    for caller in scrapes.callers:
        assert caller.recv(12) == b"HTTP/1.0 200"
        while caller.recv(4096):
            pass


def test_an_answer_that_takes_too_long_is_disconnected(
    harness: Harness, scrapes: SlowScrapes
) -> None:
    scrapes.begin(MAX_CALLS)
    harness.now_s += MAX_CALL_S + 1
    for caller in scrapes.callers:
        assert caller.recv(1) == b""
    assert harness.ask("/metrics")[0] == 503  # their threads are still at it

    scrapes.proceed.set()
    wait_until_served(harness, "/")


def wait_until_served(harness: Harness, path: str) -> None:
    """Request `path` until the threads of closed connections are free again; raise AssertionError
    after 1,000 attempts.
    """
    for _ in range(1000):
        if harness.ask(path)[0] == 200:
            return
    raise AssertionError("nobody is served any more")


GUARDED = ("/", "/page.css", "/page.js", "/charts.js", "/icon.svg", "/status.json")


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:50053",
        "localhost.attacker.example",
        "127.0.0.1.attacker.example",
        "localhost, attacker.example",
        "localhost@attacker.example",
        "192.168.1.5:50053",
        "0.0.0.0:50053",
        "[::2]:50053",
        "[127.0.0.1]",
        "[localhost]",
        "::1",
        "localhost:x",
        "",
    ],
)
def test_on_the_loopback_the_page_is_for_loopback_names(harness: Harness, host: str) -> None:
    for path in GUARDED:
        status, _, body = harness.ask(path, headers={"Host": host})
        assert status == 421
        assert b"localhost" in body
        assert b"requests" not in body
    for path in ("/metrics", "/healthz"):
        assert harness.ask(path, headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:50053", "127.0.0.1", "127.8.9.10:1", "[::1]", "[::1]:50053"]
)
def test_names_of_the_loopback(harness: Harness, host: str) -> None:
    for path in GUARDED:
        assert harness.ask(path, headers={"Host": host})[0] == 200


def test_without_a_host_the_page_is_not_shown(harness: Harness) -> None:
    with harness.connect() as caller:
        caller.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert caller.recv(12) == b"HTTP/1.0 421"


def test_a_network_address_accepts_any_host_name() -> None:
    """Calls the WSGI application directly, because a test's socket is on the loopback interface."""
    app = MetricsApplication(
        Exposition(ServiceMetrics(model="demo")), lambda: b"{}", is_local=False
    )
    reported: list[str] = []

    def start(status: str, headers: list[tuple[str, str]], /, *_: object) -> Callable[..., None]:
        del headers
        reported.append(status)
        return lambda _: None

    for path in GUARDED:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "HTTP_HOST": "penstock.example"}
        app(environ, start)
    assert reported == ["200 OK"] * len(GUARDED)
