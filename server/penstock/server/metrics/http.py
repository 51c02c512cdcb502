"""The metrics port: HTTP/1.0 on threads of its own, beside the observer's event loop.

Owns the socket and what bounds it: a few calls at a time, each with an end, and no thread outlives
the process. Does not know what is answered.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from penstock.server.metrics.application import MetricsApplication, Status
from penstock.server.metrics.exposition import Exposition
from penstock.server.metrics.service_metrics import ServiceMetrics

MAX_CALLS: Final = 8
"""Calls that are answered at a time; others are hung up on."""
MAX_CALL_S: Final = 10.0
"""How long a call may take as a whole, however slowly its client sends and reads."""
_POLL_S: Final = 0.1
_log = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = MAX_CALL_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (its name there)
        """Calls are not logged: a scraper comes every few seconds."""

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):
            # It left, or was hung up on; then its files are closed.
            _log.debug("a call on the metrics port broke off", exc_info=True)


class _BoundedServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        clock: Callable[[], float],
        *,
        is_reserved: bool,
    ) -> None:
        self.address_family = family
        self._is_reserved = is_reserved
        self._clock = clock
        self._slots = threading.BoundedSemaphore(MAX_CALLS)
        self._calls_lock = threading.Lock()
        self._begun_s: dict[socket.socket, float] = {}
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As WSGIServer's, without asking the DNS for a name that nobody reads."""
        # Whoever keeps strangers off the port is bound to it too, and shares it.
        option = socket.SO_REUSEPORT if self._is_reserved else socket.SO_REUSEADDR
        self.socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, if one is free."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._calls_lock:
            self._begun_s[request] = self._clock()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """On its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._calls_lock:
                self._begun_s.pop(request, None)
            self._slots.release()

    def service_actions(self) -> None:
        """Hang up on calls that take too long; their threads then end by themselves."""
        now = self._clock()
        with self._calls_lock:
            late = [call for call, begun_s in self._begun_s.items() if now - begun_s > MAX_CALL_S]
            for call in late:
                self._hang_up(call)

    def hang_up_all(self) -> None:
        """End every call."""
        with self._calls_lock:
            for call in self._begun_s:
                self._hang_up(call)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A fault of ours; the caller has had its 500, or is gone."""
        del request, client_address
        _log.error("a call on the metrics port failed", exc_info=True)

    @staticmethod
    def _hang_up(call: socket.socket) -> None:
        try:
            call.shutdown(socket.SHUT_RDWR)
        except OSError:
            _log.debug("already hung up")


class MetricsServer:
    """Serves metrics and the status page. Port 0 takes any free one; `port` tells which.

    Bound when it is made, so that a port in use is an OSError there. `status`: see
    `application.Status`; it is called on threads of this server. `is_reserved`: this service holds
    the port already, by a socket with SO_REUSEPORT that does not listen.
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
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _BoundedServer((host, port), family, clock, is_reserved=is_reserved)
        self._server.set_app(MetricsApplication(Exposition(metrics), status))
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
        )

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Returns at once, or as soon as the thread has seen it. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.hang_up_all()
