"""A trace collector for tests: an OTLP server on this machine that can also fail or hang.

Serves gRPC and HTTP. Keeps the requests it accepted, decoded and as bytes, and their metadata.
"""

import contextlib
import enum
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.timeout import TEST_TIMEOUT_S


class Mode(enum.Enum):
    """How the collector answers export requests."""

    OK = "ok"
    REJECTING = "rejecting"
    """Returns UNAVAILABLE, or 503."""
    EXHAUSTED = "exhausted"
    """Returns RESOURCE_EXHAUSTED, or 429."""
    HANGING = "hanging"
    """Accepts requests and does not answer until it is stopped."""
    SLOW = "slow"
    """Answers each request after `delay_s`."""


@dataclass
class Receiver:
    """The requests that a collector accepted. `endpoint`: for `OTEL_EXPORTER_OTLP_ENDPOINT`."""

    mode: Mode = Mode.OK
    delay_s: float = 0.05
    endpoint: str = ""
    requests: list[ExportTraceServiceRequest] = field(
        default_factory=list[ExportTraceServiceRequest]
    )
    payloads: list[bytes] = field(default_factory=list[bytes])
    metadata: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    num_calls: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    stopped: threading.Event = field(default_factory=threading.Event)
    """Lets hanging and delayed calls continue."""

    def take(self, payload: bytes, metadata: dict[str, str]) -> Mode:
        """Count a call, keep its request in modes OK and SLOW, and wait in modes SLOW and HANGING;
        return the mode in which to answer.
        """
        mode = self.mode
        with self._changed:
            self.num_calls += 1
            if mode in (Mode.OK, Mode.SLOW):
                self.requests.append(ExportTraceServiceRequest.FromString(payload))
                self.payloads.append(payload)
                self.metadata.append(metadata)
            self._changed.notify_all()
        if mode is Mode.HANGING:
            self.stopped.wait(TEST_TIMEOUT_S)
        elif mode is Mode.SLOW:
            self.stopped.wait(self.delay_s)
        return mode

    def spans(self) -> list[Span]:
        with self._changed:
            return [
                span
                for request in self.requests
                for part in request.resource_spans
                for scope in part.scope_spans
                for span in scope.spans
            ]

    def resources(self) -> list[dict[str, object]]:
        with self._changed:
            return [
                attributes_of(part.resource.attributes)
                for request in self.requests
                for part in request.resource_spans
            ]

    def wait_for_spans(self, num: int) -> list[Span]:
        is_there = self.wait_until(lambda: len(self.spans()) >= num)
        assert is_there, f"{len(self.spans())} of {num} spans came"
        return self.spans()

    def wait_for_names(self, trace_id: str, names: frozenset[str]) -> list[Span]:
        def of_trace() -> list[Span]:
            return [span for span in self.spans() if span.trace_id.hex() == trace_id]

        is_there = self.wait_until(lambda: names <= {span.name for span in of_trace()})
        assert is_there, f"of {sorted(names)} came {sorted({span.name for span in of_trace()})}"
        return of_trace()

    def wait_until(self, holds: Callable[[], bool], limit_s: float = TEST_TIMEOUT_S) -> bool:
        """Wait until `holds` is true, at most `limit_s` seconds; return whether it is. The
        condition is checked after every export request.
        """
        with self._changed:
            return self._changed.wait_for(holds, limit_s)

    def wait_for_call(self) -> None:
        assert self.wait_until(lambda: self.num_calls > 0)


@contextmanager
def grpc_receiver(mode: Mode = Mode.OK) -> Generator[Receiver]:
    receiver = Receiver(mode)
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    cast(Any, add_TraceServiceServicer_to_server)(_Service(receiver), server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        receiver.stopped.set()
        server.stop(grace=None).wait()


@contextmanager
def http_receiver(mode: Mode = Mode.OK) -> Generator[Receiver]:
    receiver = Receiver(mode)

    class Handler(_HttpHandler):
        reported = receiver

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def dead_endpoint() -> Generator[str]:
    """Provide an address where nothing listens and nothing else can bind."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def attributes_of(pairs: Any) -> dict[str, object]:
    """Return OTLP attributes as a dictionary, in which lists are tuples."""
    return {pair.key: _value(pair.value) for pair in cast("list[KeyValue]", pairs)}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(_value(part) for part in value.array_value.values)
    return getattr(value, kind)


class _Service(TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(  # noqa: N802 - the service's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        pairs = {str(key): str(value) for key, value in context.invocation_metadata()}
        mode = self._receiver.take(request.SerializeToString(), pairs)
        if mode is Mode.REJECTING:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        if mode is Mode.EXHAUSTED:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")
        return ExportTraceServiceResponse()


class _HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reported: Receiver

    def do_POST(self) -> None:
        payload = self.rfile.read(int(self.headers["content-length"]))
        pairs = {key.lower(): value for key, value in self.headers.items()} | {"path": self.path}
        mode = self.reported.take(payload, pairs)
        status = {Mode.REJECTING: 503, Mode.EXHAUSTED: 429}.get(mode, 200)
        body = ExportTraceServiceResponse().SerializeToString()
        self.send_response(status)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        # A client that had to wait may have disconnected.
        with contextlib.suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        pass
