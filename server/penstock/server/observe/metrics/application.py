"""The WSGI application of the metrics port. Serves the metrics, the status page, its data
(`/status.json`) and the health check.

Defines the routes, the access rules and the keys of `/status.json`. The status is cached, so that
the service is queried at most twice per second for any number of viewers. Uses no sockets and
creates no threads. The application is read-only.
"""

import asyncio
import gzip
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import resources
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

import msgspec

from penstock.server.observe.metrics.exposition import Exposition
from penstock.server.observe.operations.snapshot import (
    OperationsError,
    RequestView,
    Snapshot,
)
from penstock.server.security.authenticator import (
    Authenticator,
    InvalidCredentials,
    TenantNotListed,
)
from penstock.server.security.rights import Right

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from penstock.server.observe.operations.service import Operations


logger = logging.getLogger(__name__)
Status = Callable[[], bytes]
"""Returns the JSON of the status page. Raises OperationsError, TimeoutError, CancelledError or
RuntimeError if it is unavailable."""
_TEXT: Final = "text/plain; charset=utf-8"
_PAGE: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS: Final = (
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Server", "penstock"),  # Without the versions of the HTTP server and of Python.
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_MIN_GZIP_BYTES: Final = 1024
METRICS_PATH: Final = "/metrics"
HEALTH_PATH: Final = "/healthz"
_OPEN_PATHS: Final = frozenset({METRICS_PATH, HEALTH_PATH})
"""Paths that are served for any Host header, because scrapers and probes use arbitrary names."""
_HOST: Final = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[0-9a-zA-Z.-]+))(?::[0-9]*)?")
MAX_STATUS_CALLS: Final = 4
"""Maximum number of concurrent status queries. It is less than `http.MAX_CALLS`, so that a slow
engine does not block the page."""
MAX_REQUESTS: Final = 500
"""Maximum number of live requests in the list `requests` of `/status.json`, which has the oldest
first; `num_requests` is the number of all live requests."""
MAX_AGE_S: Final = 0.5
TIMEOUT_S: Final = 5.0


class MetricsAccess:
    """Decides from the Authorization header whether a caller may read the metrics. Thread-safe."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def fault(self, authorization: str | None) -> HTTPStatus | None:
        """Return the error status for a caller with this Authorization header; None if access is
        permitted. `authorization` is None if the header is missing."""
        shown = [] if authorization is None else [authorization]
        try:
            # This port does not request client certificates.
            caller = self._authenticator.identify(shown, tuple)
        except InvalidCredentials as error:
            logger.info("rejected at the metrics port: %s", error)
            return HTTPStatus.UNAUTHORIZED
        except TenantNotListed as error:
            logger.info("rejected at the metrics port: %s", error)
            return HTTPStatus.FORBIDDEN
        if Right.METRICS not in caller.rights:
            logger.info("tenant %s may not read metrics", caller.tenant)
            return HTTPStatus.FORBIDDEN
        return None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _HttpCall:
    path: str
    accept: str
    parameters: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])


class MetricsApplication:
    """The WSGI application. `is_local` is True if its port is bound to a loopback address.

    If `is_local`, requests for the page and its status must have a loopback name in the Host
    header, so that other web pages cannot read them by DNS rebinding. `access` checks the
    Authorization header; if it is None, all callers are permitted. Health probes are always
    permitted.
    """

    def __init__(
        self,
        exposition: Exposition,
        status: Status,
        *,
        is_local: bool,
        access: MetricsAccess | None = None,
    ) -> None:
        self._exposition = exposition
        self._access = access
        self._status = status
        self._is_local = is_local
        self._status_slots = threading.BoundedSemaphore(MAX_STATUS_CALLS)
        folder = resources.files("penstock.server.observe.metrics") / "page"
        self._page = {
            path: _Answer(HTTPStatus.OK, (folder / name).read_bytes(), content_type)
            for path, (name, content_type) in _PAGE.items()
        }

    def __call__(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        """Handle one WSGI request: check the caller, then return the body for the path (empty for a
        HEAD request)."""
        answer = self._answer(environ)
        body = answer.body
        headers = [("Content-Type", answer.content_type), *_HEADERS, *answer.headers]
        if not any(name == "Cache-Control" for name, _ in headers):
            headers.append(("Cache-Control", "no-cache"))
        if len(body) >= _MIN_GZIP_BYTES:
            headers.append(("Vary", "Accept-Encoding"))
            if _accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
                body = gzip.compress(body, compresslevel=6)
                headers.append(("Content-Encoding", "gzip"))
        headers.append(("Content-Length", str(len(body))))
        start_response(f"{answer.status.value} {answer.status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: "WSGIEnvironment") -> _Answer:
        path = environ.get("PATH_INFO", "")
        route = self._route(path)
        if route is None:
            return _Answer(HTTPStatus.NOT_FOUND, b"not found\n")
        is_guarded = self._is_local and path not in _OPEN_PATHS
        if is_guarded and not _is_loopback(environ.get("HTTP_HOST", "")):
            text = b"the Host header must be localhost or a loopback address\n"
            return _Answer(HTTPStatus.MISDIRECTED_REQUEST, text)
        if self._access is not None and path != HEALTH_PATH:
            fault = self._access.fault(environ.get("HTTP_AUTHORIZATION"))
            if fault is not None:
                text = f"{fault.phrase}\n".encode()
                return _Answer(fault, text, headers=(("WWW-Authenticate", "Bearer"),))
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            allow = (("Allow", "GET, HEAD"),)
            return _Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"use GET or HEAD\n", headers=allow)
        parameters = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        known = {"compat"} if path == METRICS_PATH else set[str]()
        for name, values in parameters.items():
            if name not in known:
                text = f"unknown query parameter {name!r}\n".encode()
                return _Answer(HTTPStatus.BAD_REQUEST, text)
            if len(values) > 1:
                return _Answer(HTTPStatus.BAD_REQUEST, f"duplicate parameter {name}\n".encode())
        return route(_HttpCall(path, environ.get("HTTP_ACCEPT", ""), parameters))

    def _route(self, path: str) -> "Callable[[_HttpCall], _Answer] | None":
        if path in self._page:
            return lambda call: self._page[call.path]
        routes: dict[str, Callable[[_HttpCall], _Answer]] = {
            METRICS_PATH: self._metrics,
            "/status.json": self._status_json,
            HEALTH_PATH: lambda _: _Answer(HTTPStatus.OK, b"ok\n"),
        }
        return routes.get(path)

    def _metrics(self, call: _HttpCall) -> _Answer:
        (compat,) = call.parameters.get("compat", [""])
        if "compat" in call.parameters and not compat:
            return _Answer(HTTPStatus.BAD_REQUEST, b"compat must not be empty\n")
        try:
            body, content_type = self._exposition.render(call.accept, compat)
        except ValueError as error:
            return _Answer(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())
        return _Answer(HTTPStatus.OK, body, content_type)

    def _status_json(self, call: _HttpCall) -> _Answer:
        del call
        fresh = (("Cache-Control", "no-store"),)
        unavailable = HTTPStatus.SERVICE_UNAVAILABLE
        if not self._status_slots.acquire(blocking=False):
            later = (*fresh, ("Retry-After", "1"))
            return _Answer(unavailable, b"too many concurrent requests\n", headers=later)
        try:
            body = self._status()
        except (OperationsError, TimeoutError, CancelledError, RuntimeError) as error:
            logger.debug("the status page has no status to show: %s", type(error).__name__)
            return _Answer(unavailable, b"the status is not available now\n", headers=fresh)
        finally:
            self._status_slots.release()
        return _Answer(HTTPStatus.OK, body, "application/json", fresh)


def _accepts_gzip(accept_encoding: str) -> bool:
    """Return True if gzip is listed and not excluded (`q=0`)."""
    for entry in accept_encoding.split(","):
        name, _, parameters = entry.partition(";")
        if name.strip().lower() == "gzip":
            return parameters.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _is_loopback(host: str) -> bool:
    """Return True if a Host header, with or without a port, is a loopback name."""
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match["v6"] or match["name"]
    if name.lower() == "localhost":
        return match["v6"] is None
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback and (address.version == 6) == (match["v6"] is not None)


def status_json(
    snapshot: Snapshot, requests: tuple[RequestView, ...], requests_problem: str = ""
) -> bytes:
    """Return the status as UTF-8 JSON, in which numbers that are not finite are null.

    It has the fields of `snapshot`, the first MAX_REQUESTS of `requests`, `num_requests` (the
    number of all requests) and `requests_problem`: the reason why the live requests could not be
    queried, empty if they were.
    """
    status = {
        **msgspec.to_builtins(snapshot),
        "requests": requests[:MAX_REQUESTS],
        "num_requests": len(requests),
        "requests_problem": requests_problem,
    }
    # In a page `</script>` would end the script element, so it is escaped.
    return msgspec.json.encode(status).replace(b"<", b"\\u003c")


class LiveStatus:
    """Queries the status of the service on the event loop `loop` and caches it. May be called from
    any thread except the thread of `loop`."""

    def __init__(
        self,
        operations: "Operations",
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operations = operations
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._status = b""
        self._as_of_s = float("-inf")

    def __call__(self) -> bytes:
        """Return the status as JSON, at most MAX_AGE_S seconds old.

        Raises TimeoutError after TIMEOUT_S seconds, RuntimeError if the event loop is closed, and
        CancelledError if it stops.
        """
        with self._lock:
            if self._clock() - self._as_of_s > MAX_AGE_S:
                asked = self._query()
                try:
                    future = asyncio.run_coroutine_threadsafe(asked, self._loop)
                except RuntimeError:
                    asked.close()
                    raise
                try:
                    self._status = future.result(TIMEOUT_S)
                except TimeoutError:
                    future.cancel()
                    raise
                self._as_of_s = self._clock()
            return self._status

    async def _query(self) -> bytes:
        requests: tuple[RequestView, ...] = ()
        problem = ""
        try:
            requests = await self._operations.live_requests()
        except OperationsError as error:
            problem = str(error)
        return status_json(self._operations.snapshot(), requests, problem)
