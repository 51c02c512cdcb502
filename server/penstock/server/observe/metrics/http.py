"""The metrics port: an HTTP/1.0 server on separate threads, next to the observer's event loop.

Owns the socket and the threads. The threads end with the process. Routes and access rules are in
`application.py`.

At most MAX_CALLS requests are handled at a time. A request takes one of these slots only when it is
complete, so that idle connections do not block others. Health probes need no slot.
"""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from penstock.server.observe.metrics.application import (
    HEALTH_PATH,
    METRICS_PATH,
    MetricsAccess,
    MetricsApplication,
    Status,
)
from penstock.server.observe.metrics.exposition import Exposition
from penstock.server.observe.metrics.service_metrics import ServiceMetrics
from penstock.server.security.security import Security, is_loopback
from penstock.server.security.tls_files import HttpsContext

_POLL_S: Final = 0.1
_RETRY_AFTER_S: Final = 1


MAX_CALLS: Final = 8
"""Maximum number of requests that are handled concurrently."""
MAX_OTHER_CALLS: Final = 6
"""When this many requests are handled, only scrapes are accepted, so that requests of the status
page do not block them."""
MAX_PENDING: Final = 64
"""Maximum number of connections without a complete request. Beyond it the oldest is closed."""
MAX_RECEIVE_S: Final = 2.0
"""Time limit for a request to arrive, in seconds."""
MAX_CALL_S: Final = 10.0
"""Time limit for a response to be created and read, in seconds."""
logger = logging.getLogger(__name__)


class OpenConnections:
    """Tracks the connections of one server, and limits their number and duration. Thread-safe.
    `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Both are in order of time, the oldest first.
        self._pending_since_s: dict[socket.socket, float] = {}
        self._handled_since_s: dict[socket.socket, float] = {}

    def add(self, connection: socket.socket) -> None:
        """Register a connection. If MAX_PENDING connections have no complete request yet, close the
        oldest of them first.

        `remove` must be called when the thread of the connection ends.
        """
        with self._lock:
            if len(self._pending_since_s) >= MAX_PENDING:
                oldest = next(iter(self._pending_since_s))
                del self._pending_since_s[oldest]
                _disconnect(oldest)
            self._pending_since_s[connection] = self._clock()

    def acquire_slot(self, connection: socket.socket, *, is_scrape: bool) -> bool:
        """Reserve a slot for a complete request. Returns False if there is none, or if the
        connection was closed.

        If `is_scrape`, the request may also use the slots that are reserved for scrapes.
        """
        max_calls = MAX_CALLS if is_scrape else MAX_OTHER_CALLS
        with self._lock:
            if connection not in self._pending_since_s or len(self._handled_since_s) >= max_calls:
                return False
            del self._pending_since_s[connection]
            self._handled_since_s[connection] = self._clock()
            return True

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection whose thread has ended, and free its slot."""
        with self._lock:
            self._pending_since_s.pop(connection, None)
            self._handled_since_s.pop(connection, None)

    def close_late(self) -> None:
        """Close connections that have sent no complete request within MAX_RECEIVE_S, and
        connections with a request that is not finished within MAX_CALL_S. Their threads then
        end."""
        now_s = self._clock()
        with self._lock:
            pending = _older(self._pending_since_s, now_s - MAX_RECEIVE_S)
            for connection in pending:
                del self._pending_since_s[connection]
            # A slot is occupied until the thread ends, because slots count threads.
            for connection in (*pending, *_older(self._handled_since_s, now_s - MAX_CALL_S)):
                _disconnect(connection)

    def close_all(self) -> None:
        """Close every connection."""
        with self._lock:
            for connection in (*self._pending_since_s, *self._handled_since_s):
                _disconnect(connection)


def _older(since_s: dict[socket.socket, float], limit_s: float) -> list[socket.socket]:
    return [connection for connection, begun_s in since_s.items() if begun_s < limit_s]


def _disconnect(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("already disconnected")


class _Handler(WSGIRequestHandler):
    timeout = MAX_CALL_S

    def version_string(self) -> str:
        """Return the Server header, without the versions of Python and of its HTTP server."""
        return "penstock"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (its name there)
        """Log nothing, because a scraper sends a request every few seconds."""

    def parse_request(self) -> bool:
        """Parse the request as the base class does, then take a slot unless it is a health probe.
        Returns False if an error response has been sent."""
        if not super().parse_request():
            return False
        path = self.path.partition("?")[0]
        # Health needs no slot, because a failed probe would restart a busy service.
        if path == HEALTH_PATH:
            return True
        assert isinstance(self.server, _BoundedServer)
        if self.server.connections.acquire_slot(self.connection, is_scrape=path == METRICS_PATH):
            return True
        self._reject()
        return False

    def _reject(self) -> None:
        body = b"too many concurrent requests\n"
        self.send_response(HTTPStatus.SERVICE_UNAVAILABLE)
        self.send_header("Retry-After", str(_RETRY_AFTER_S))
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):
            # The client has disconnected or was disconnected, which closes the files.
            logger.debug("a request on the metrics port was interrupted", exc_info=True)


class _BoundedServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_PENDING

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        clock: Callable[[], float],
        *,
        is_reserved: bool,
        https: HttpsContext | None,
    ) -> None:
        self._https = https
        self.address_family = family
        self._is_reserved = is_reserved
        self.connections = OpenConnections(clock)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind as WSGIServer does, but without its DNS lookup, because the result would not be
        used."""
        # The socket that reserves the port is bound to it too.
        option = socket.SO_REUSEPORT if self._is_reserved else socket.SO_REUSEADDR
        self.socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept the next connection and return it with its address. The TLS handshake happens
        later, on the thread of the connection."""
        accepted, address = super().get_request()
        return (accepted if self._https is None else self._https.wrap(accepted)), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Register the connection and start a thread that handles its request."""
        self.connections.add(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # No thread could be started.
            self.connections.remove(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the request on the thread of its connection, then remove the connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.remove(request)

    def service_actions(self) -> None:
        """Close connections that have exceeded their time limit. Called between two polls of the
        socket."""
        self.connections.close_late()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an internal error. The client has received status 500 or has disconnected."""
        del request, client_address
        logger.error("a call on the metrics port failed", exc_info=sys.exception())


class MetricsServer:
    """Serves the metrics and the status page. Port 0 binds any free port; `self.port`
    is the actual port.

    The constructor binds the port, and raises OSError if that fails. For `status` see
    `application.Status`; it is called on threads of this server. `is_reserved` is True if this
    service has already bound the port with a SO_REUSEPORT socket that does not listen. If
    `security` is set, its TLS applies to this port too, and its credentials are required unless the
    port is on a loopback address.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        metrics: ServiceMetrics,
        status: Status,
        clock: Callable[[], float] = time.monotonic,
        is_reserved: bool = False,
        security: Security | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        tls = None if security is None else security.tls
        https = None if tls is None else HttpsContext(tls)
        self._server = _BoundedServer(
            (host, port), family, clock, is_reserved=is_reserved, https=https
        )
        # The bound address, because the setting may be a name.
        is_local = is_loopback(self._server.server_name)
        authenticator = None if security is None or is_local else security.authenticator
        access = None if authenticator is None else MetricsAccess(authenticator)
        app = MetricsApplication(Exposition(metrics), status, is_local=is_local, access=access)
        self._server.set_app(app)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
        )

    def start(self) -> None:
        """Start the thread that serves requests."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close all connections. Blocks until the server's thread has ended.
        Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.connections.close_all()
