"""Runs the servers that the cost of tracing is compared with (bare grpc.aio), or a collector.

Every server responds to `Generate` with 16 messages of one token, one per step of 5 ms, from an
asynchronous generator on uvloop, with minimal overhead. Roles of this program:

    bare              no tracing
    metadata          no tracing, but initial metadata, as from a server that returns a trace id
    sdk ENDPOINT      spans built on the event loop when a request has ended: a root with twelve
                      attributes and three children; the SDK's batch processor, OTLP over gRPC
    contrib ENDPOINT  the interceptor of opentelemetry-instrumentation-grpc, the same processor
    collector         receives spans over OTLP/gRPC and counts them
    hanging           receives spans and never responds

Each prints its port on stdout when it is serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from loop_ticks import start_ticking
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import output_pb2
from usage import print_usage

NUM_TOKENS = 16
STEP_S = 0.005
COUNT_METHOD = "/penstock.benchmark.Collector/Count"
EXPORT_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_SERVICE = "penstock.v1.GenerationService"
_HANG_S = 600.0
_TRACE_METADATA = (
    ("x-trace-id", "4bf92f3577b34da6a3ce929d0e0e4736"),
    ("traceresponse", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),
)
Note = Callable[[int, int, int], None]
"""Called with the times of an ended request: arrival, first token, last token; Unix ns."""


class Steps:
    """A periodic step shared by all streams, like the steps of an engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] = self._loop.create_future()
        self._due_s = self._loop.time()
        self._tick()

    def next(self) -> asyncio.Future[None]:
        """Return a future that completes with the next step."""
        return self._next

    def _tick(self) -> None:
        done, self._next = self._next, self._loop.create_future()
        done.set_result(None)
        self._due_s += STEP_S
        self._loop.call_at(self._due_s, self._tick)


async def serve(note: Note | None, *, has_metadata: bool, interceptors: Sequence[Any]) -> None:
    """Run a server of `Generate` until SIGTERM, and print its port.

    `note` is called when a request has ended. If `has_metadata` is True, the server sends a trace
    id as initial metadata.
    """
    steps = Steps()

    async def generate(
        request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        arrival_ns = time.time_ns()
        if has_metadata:
            await context.send_initial_metadata(_TRACE_METADATA)
        first_ns = 0
        for sequence in range(request.stopping.max_tokens):
            await steps.next()
            first_ns = first_ns or time.time_ns()
            tokens = output_pb2.TokenDelta(text=" word", num_tokens=1)
            yield pb.GenerateResponse(sequence=sequence, tokens=tokens)
        finished = output_pb2.RequestFinished()
        yield pb.GenerateResponse(sequence=NUM_TOKENS, finished=finished)
        if note is not None:
            note(arrival_ns, first_ns, time.time_ns())

    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server = grpc.aio.server(interceptors=interceptors)
    service = grpc.method_handlers_generic_handler(_SERVICE, {"Generate": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    start_ticking()
    # As Penstock does: objects from before the first request are exempt from garbage collection.
    gc.collect()
    gc.freeze()
    print(port, flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def sdk_provider(endpoint: str) -> Any:
    """Return a tracer provider of the SDK in its usual configuration."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def sdk_note(endpoint: str) -> Note:
    """Return a function that builds the spans of an ended request synchronously."""
    from opentelemetry.trace import SpanKind, set_span_in_context

    tracer = sdk_provider(endpoint).get_tracer("benchmark")

    def note(arrival_ns: int, first_ns: int, end_ns: int) -> None:
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": f"{_SERVICE}/Generate",
            "rpc.response.status_code": "OK",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": "model",
            "gen_ai.request.max_tokens": NUM_TOKENS,
            "gen_ai.request.stream": True,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": 64,
            "gen_ai.usage.output_tokens": NUM_TOKENS,
            "gen_ai.latency.e2e": (end_ns - arrival_ns) * 1e-9,
        }
        root = tracer.start_span(
            f"{_SERVICE}/Generate",
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=arrival_ns,
        )
        context = set_span_in_context(root)
        edges = (arrival_ns, (arrival_ns + first_ns) // 2, first_ns, end_ns)
        for name, start, end in zip(("queue", "prefill", "decode"), edges, edges[1:], strict=False):
            tracer.start_span(name, context=context, start_time=start).end(end)
        root.end(end_ns)

    return note


def contrib_interceptor(endpoint: str) -> Any:
    """Return opentelemetry-instrumentation-grpc's interceptor for grpc.aio servers."""
    # Not a dependency, so a type checker may not find it.
    contrib: Any = importlib.import_module("opentelemetry.instrumentation.grpc")
    return contrib.aio_server_interceptor(tracer_provider=sdk_provider(endpoint))


class Collector:
    """An OTLP receiver that counts all spans and root spans."""

    def __init__(self, *, is_hanging: bool) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

        self._messages = otlp
        self._is_hanging = is_hanging
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._counts = {"num_spans": 0, "num_roots": 0, "num_calls": 0}

    def serve(self) -> None:
        """Serve until terminated."""
        server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        unary = grpc.unary_unary_rpc_method_handler
        export: grpc.RpcMethodHandler[bytes, bytes] = unary(self._export)
        count: grpc.RpcMethodHandler[bytes, bytes] = unary(self._count)
        service, _, method = COUNT_METHOD[1:].partition("/")
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(EXPORT_SERVICE, {"Export": export}),
                grpc.method_handlers_generic_handler(service, {method: count}),
            )
        )
        port = server.add_insecure_port("127.0.0.1:0")
        stop = self._stop

        def end(number: int, frame: object) -> None:
            del number, frame
            stop.set()

        signal.signal(signal.SIGTERM, end)
        server.start()
        print(port, flush=True)
        self._stop.wait()
        server.stop(0)

    def _export(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        del context
        request = self._messages.ExportTraceServiceRequest.FromString(data)
        spans = [
            span
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]
        num_roots = sum(not span.parent_span_id for span in spans)
        with self._lock:
            self._counts["num_calls"] += 1
            if not self._is_hanging:
                self._counts["num_spans"] += len(spans)
                self._counts["num_roots"] += num_roots
        if self._is_hanging:
            self._stop.wait(_HANG_S)
        return b""

    def _count(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        del data, context
        with self._lock:
            return json.dumps(self._counts).encode()


def main(role: str, endpoint: str = "") -> None:
    """Run the process of `role` with its arguments."""
    if role in ("collector", "hanging"):
        Collector(is_hanging=role == "hanging").serve()
        return
    import uvloop

    note = sdk_note(endpoint) if role == "sdk" else None
    interceptors = [contrib_interceptor(endpoint)] if role == "contrib" else []
    uvloop.run(serve(note, has_metadata=role == "metadata", interceptors=interceptors))


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=1)
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
