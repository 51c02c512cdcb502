"""Requests of each method and each kind of end at a real service: exactly one correct
trace each.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from penstock.client import OperationsClient, RequestState
from penstock.server.observe.spans import keys
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.calls import SERVICE, STYLES, TracedCall, until_listed
from support.fronts import SMALL_WINDOW
from support.generate_requests import greedy
from support.observation import observed
from support.otlp_receiver import attributes_of, grpc_receiver
from support.service import Service, simulated, until_health

HEALTH = health_pb2.HealthCheckResponse
OPTIONS = (
    *("--fronts", "1", "--max-num-seqs", "3", "--max-num-waiting", "4"),
    *("--max-backlog-tokens", "128", "--max-reader-stall-s", "0.3", "--drain-timeout-s", "3"),
    *("--max-replays", "0"),
)
# A service that stops exports the remaining traces within a second, so few may remain. On a busy
# machine an export may take longer than the usual timeout, which would drop it.
OFTEN = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
LONG = 900  # tokens, about eighteen seconds of them
PREPARED = ("prepare",)
WHOLE = ("prepare", "queue", "prefill", "decode", "deliver")
_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}


@dataclass(frozen=True)
class Expected:
    """The expected trace of a request. `children`: names of the root's child spans, None for any;
    `attributes`: expected attributes by the span's name ("": the root).

    `or_children`: names accepted instead of `children`, for a request that may end in two ways.
    """

    code: str
    reason: str = ""
    children: tuple[str, ...] | None = None
    attributes: Mapping[str, Mapping[str, object]] = field(
        default_factory=dict[str, dict[str, object]]
    )
    or_children: tuple[str, ...] | None = None


def check_traces(spans: Sequence[Span], expected: dict[str, tuple[TracedCall, Expected]]) -> None:
    """Check that each request has its expected trace, and that there is no other trace. Raises
    AssertionError with the errors of all requests, by name.
    """
    traces: dict[bytes, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    problems: dict[str, str] = {}
    for name, (call, wanted) in expected.items():
        try:
            _check_trace(traces.pop(call.parent_trace_id, []), call, wanted)
        except AssertionError as error:
            problems[name] = str(error)
    assert problems == {}, "\n".join(f"{name}: {why}" for name, why in problems.items())
    assert not traces, "traces of requests that nobody sent"


def _check_trace(spans: Sequence[Span], call: TracedCall, wanted: Expected) -> None:
    roots = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert len(roots) == 1, f"{len(roots)} roots"
    (root,) = roots
    assert root.name == f"{SERVICE}/{call.style}"
    assert root.parent_span_id == call.span_id, "it is no child of its caller"
    reported = attributes_of(root.attributes)
    assert reported[keys.RPC_STATUS] == wanted.code, reported
    assert reported.get(keys.ERROR_REASON, "") == wanted.reason, reported
    is_error = root.status.code == Status.STATUS_CODE_ERROR
    assert is_error is (wanted.code in _ERRORS), root.status
    assert root.status.message == ""
    children = sorted(
        (span for span in spans if span is not root), key=lambda span: span.start_time_unix_nano
    )
    assert {span.parent_span_id for span in children} == {root.span_id}
    edges = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in children]
    assert edges[0][0] == root.start_time_unix_nano
    assert edges[-1][1] == root.end_time_unix_nano
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges)), edges
    names = tuple(span.name for span in children)
    assert wanted.children is None or names in (wanted.children, wanted.or_children), names
    for name, attributes in wanted.attributes.items():
        span = root if not name else children[names.index(name)]
        reported = attributes_of(span.attributes)
        assert {key: reported.get(key) for key in attributes} == attributes, reported


@contextlib.asynccontextmanager
async def cancelled_after(calls: Sequence[TracedCall]) -> AsyncGenerator[None]:
    """Cancel the calls at the end of the block, and wait for their ends."""
    try:
        yield
    finally:
        for call in calls:
            call.call.cancel()
        await asyncio.gather(*(call.outcome() for call in calls))


@dataclass
class Site:
    """A service, and the expected trace of every request sent to it."""

    service: Service
    operations: OperationsClient
    channel: grpc.aio.Channel
    expected: dict[str, tuple[TracedCall, Expected]] = field(
        default_factory=dict[str, tuple[TracedCall, Expected]]
    )

    def call(
        self,
        name: str,
        style: str,
        message: pb.GenerateRequest | bytes,
        wanted: Expected,
        **how: Any,
    ) -> TracedCall:
        call = TracedCall(how.pop("channel", self.channel), style, message, **how)
        self.expected[f"{name}, {style}"] = (call, wanted)
        return call

    async def ask(
        self,
        name: str,
        style: str,
        message: pb.GenerateRequest | bytes,
        wanted: Expected,
        **how: Any,
    ) -> TracedCall:
        call = self.call(name, style, message, wanted, **how)
        assert await call.outcome() == wanted.code, f"{name}, {style}"
        return call

    async def running(self, name: str, style: str, wanted: Expected, num: int) -> list[TracedCall]:
        """Send `num` requests; return them once all are running."""
        calls = [
            self.call(f"{name}, running {number}", style, greedy(LONG, (9, number)), wanted)
            for number in range(num)
        ]
        await until_listed(self.operations, calls, RequestState.PROCESSING)
        return calls


CANCELLED = Expected("CANCELLED")


async def ok(site: Site, style: str) -> None:
    await site.ask("ok", style, greedy(), Expected("OK", "", WHOLE))


async def stop_string(site: Site, style: str) -> None:
    reported = await site.ask("the text", style, greedy(20), Expected("OK", "", WHOLE))
    message = greedy(20)
    message.stopping.stop_strings.append(reported.text[8:11])
    finish = {"": {keys.RESPONSE_FINISH_REASONS: ("stop",)}}
    await site.ask("stop string", style, message, Expected("OK", "", WHOLE, finish))


async def client_cancels(site: Site, style: str) -> None:
    (call,) = await site.running("left", style, Expected("CANCELLED"), 1)
    call.call.cancel()
    assert await call.outcome() == "CANCELLED"


async def cancel_rpc(site: Site, style: str) -> None:
    finish = {"": {keys.RESPONSE_FINISH_REASONS: ("cancelled",)}}
    (call,) = await site.running("cancelled", style, Expected("OK", "", None, finish), 1)
    stub = pb_grpc.GenerationServiceStub(site.channel)
    await stub.Cancel(pb.CancelRequest(request_id=call.request_id))
    assert await call.outcome() == "OK"


async def grpc_deadline(site: Site, style: str) -> None:
    # Engine and gRPC end the request at the same time; the engine's end may be delivered.
    wanted = Expected("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", WHOLE[:-1], or_children=WHOLE)
    await site.ask("deadline of the call", style, greedy(LONG), wanted, timeout_s=4.0)


async def deadline_in_the_queue(site: Site, style: str) -> None:
    blockers = await site.running("before a deadline", style, CANCELLED, 3)
    async with cancelled_after(blockers):
        message = greedy()
        message.scheduling.total_timeout.FromMilliseconds(1000)
        why = {"queue": {keys.QUEUE_REASON: "slots", keys.QUEUE_OUTCOME: "deadline"}}
        wanted = Expected("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", None, why)
        await site.ask("deadline in the queue", style, message, wanted)


async def queue_full(site: Site, style: str) -> None:
    blockers = await site.running("before a full queue", style, CANCELLED, 3)
    why = {"queue": {keys.QUEUE_REASON: "slots", keys.QUEUE_OUTCOME: "cancelled"}}
    waited = Expected("CANCELLED", "", None, why)
    waiting = [
        site.call(f"waits {number}", style, greedy(LONG, (8, number)), waited)
        for number in range(4)
    ]
    async with cancelled_after([*blockers, *waiting]):
        await until_listed(site.operations, waiting, RequestState.PENDING)
        await site.ask("queue full", style, greedy(), Expected("RESOURCE_EXHAUSTED", "QUEUE_FULL"))


async def invalid_field(site: Site, style: str) -> None:
    message = greedy()
    message.sampling.temperature = -1.0
    wanted = Expected("INVALID_ARGUMENT", "INVALID_ARGUMENT", PREPARED)
    await site.ask("invalid field", style, message, wanted)


async def malformed(site: Site, style: str) -> None:
    if style == "Multiplex":
        return  # bytes that are no command are no request
    wanted = Expected("INVALID_ARGUMENT", "MALFORMED_REQUEST", PREPARED)
    await site.ask("malformed", style, b"\x0a\xff\xff\xff\x7fno message", wanted)


async def unknown_model(site: Site, style: str) -> None:
    message = greedy()
    message.model = "nobody"
    wanted = Expected("NOT_FOUND", "MODEL_NOT_FOUND", PREPARED)
    await site.ask("unknown model", style, message, wanted)


async def duplicate_id(site: Site, style: str) -> None:
    first = await site.running("before its double", style, CANCELLED, 1)
    async with cancelled_after(first):
        message = greedy()
        message.request_id = first[0].request_id
        wanted = Expected("ALREADY_EXISTS", "REQUEST_ID_IN_USE", PREPARED)
        await site.ask("duplicate id", style, message, wanted)


async def stalled_reader(site: Site, style: str) -> None:
    if style == "GenerateOnce":
        return  # its one message is not written before its end
    message = greedy(LONG)
    message.output.return_token_ids = True
    message.output.logprobs = 20
    wanted = Expected("RESOURCE_EXHAUSTED", "READER_STALLED")
    async with grpc.aio.insecure_channel(site.service.address, options=SMALL_WINDOW) as channel:
        how: dict[str, Any] = {"credit": 0} if style == "Multiplex" else {}
        call = site.call("stalled", style, message, wanted, channel=channel, **how)
        if style == "Generate":
            named = (f"request={call.request_id}", f"trace={call.parent_trace_id.hex()}")
            await site.service.until_logged("stalled reader disconnected", *named)
        assert await call.outcome() == wanted.code


ENDS: tuple[Callable[[Site, str], Awaitable[None]], ...] = (
    ok,
    stop_string,
    client_cancels,
    cancel_rpc,
    grpc_deadline,
    deadline_in_the_queue,
    queue_full,
    invalid_field,
    malformed,
    unknown_model,
    duplicate_id,
    stalled_reader,
)


async def kill_the_engine(site: Site) -> None:
    wanted = Expected("UNAVAILABLE", "ENGINE_DOWN")
    calls = [call for style in STYLES for call in await site.running("killed", style, wanted, 1)]
    waited = Expected("UNAVAILABLE", "ENGINE_DOWN", ("prepare", "queue", "deliver"))
    calls.append(site.call("killed, waiting", "Generate", greedy(), waited))
    await until_listed(site.operations, calls[-1:], RequestState.PENDING)
    os.kill(await site.service.next_pid("engine"), signal.SIGKILL)
    assert [await call.outcome() for call in calls] == ["UNAVAILABLE"] * len(calls)
    await site.service.next_pid("engine")
    await until_health(site.channel, HEALTH.SERVING)


async def drain(site: Site) -> None:
    wanted = Expected("UNAVAILABLE", "DRAINING")
    calls = [call for style in STYLES for call in await site.running("drained", style, wanted, 1)]
    site.service.signal(signal.SIGTERM)
    await until_health(site.channel, HEALTH.NOT_SERVING)
    rejected = Expected("UNAVAILABLE", "DRAINING", PREPARED)
    for style in STYLES[:2]:
        await site.ask("rejected in a drain", style, greedy(), rejected)
    assert [await call.outcome() for call in calls] == ["UNAVAILABLE"] * len(calls)
    assert await site.service.ended() == 0


async def test_every_kind_of_end_gives_one_trace() -> None:
    with grpc_receiver() as collector:
        arguments = (
            *(*simulated(step_s=0.02), *OPTIONS, "--deadline-admission", "off"),
            *("--otlp-endpoint", collector.endpoint),
        )
        async with (
            observed(*arguments, environment=OFTEN) as (service, operations),
            service.channel() as channel,
        ):
            site = Site(service, operations, channel)
            for end in ENDS:
                for style in STYLES:
                    await end(site, style)
            await kill_the_engine(site)
            await drain(site)
        check_traces(collector.spans(), site.expected)


async def test_a_request_that_cannot_meet_its_deadline_gives_one_trace() -> None:
    # Steps are long enough to be regular even on a busy machine; otherwise nothing is predicted.
    cost = '{"step_s": 0.1, "prefill_token_s": 0, "decode_slot_s": 0, "context_token_s": 0}'
    with grpc_receiver() as collector:
        arguments = (
            *(*simulated(step_s=0.1), *OPTIONS, "--step-cost", cost),
            *("--otlp-endpoint", collector.endpoint),
        )
        async with (
            observed(*arguments, environment=OFTEN) as (service, operations),
            service.channel() as channel,
        ):
            site = Site(service, operations, channel)
            # No request is rejected by cost coefficients that no step has confirmed.
            await site.ask("before", "Generate", greedy(40), Expected("OK", "", WHOLE))
            wanted = Expected("DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE")
            for style in STYLES:
                message = greedy(LONG)
                message.stopping.min_tokens = LONG
                message.scheduling.total_timeout.FromMilliseconds(4000)
                call = await site.ask("unreachable", style, message, wanted)
                root = frozenset({f"penstock.v1.GenerationService/{style}"})
                await asyncio.to_thread(collector.wait_for_names, call.parent_trace_id.hex(), root)
            service.signal(signal.SIGTERM)
            assert await service.ended() == 0
        check_traces(collector.spans(), site.expected)
