"""Requests of every style to a real service, each under its own trace, and their ends.

Contains the calls, and the check of a trace against what the request's client knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from penstock.client import LiveRequest, OperationsClient, RequestState, WaitReason
from penstock.server.observe.spans import keys
from penstock.v1 import generation_service_pb2 as pb
from support.otlp_receiver import attributes_of
from support.service import PATIENCE_S

SERVICE = "penstock.v1.GenerationService"
STYLES = ("Generate", "GenerateOnce", "Multiplex")
WHOLE = ("prepare", "queue", "prefill", "decode", "deliver")
_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_KEY = 7


def request(num_tokens: int = 3, prompt: Sequence[int] = (5, 6, 7, 8)) -> pb.GenerateRequest:
    """Return a greedy request of `num_tokens` arbitrary output tokens."""
    message = pb.GenerateRequest()
    message.token_prompt.ids.extend(prompt)
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = num_tokens
    message.stopping.ignore_eos = True
    return message


class TracedCall:
    """One request. Bytes are sent unchanged.

    `credit`: of a Multiplex request. Nothing is read before `outcome` is called.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        style: str,
        message: pb.GenerateRequest | bytes,
        *,
        timeout_s: float = PATIENCE_S,
        credit: int | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.style = style
        self.trace_id, self.span_id = secrets.token_bytes(16), secrets.token_bytes(8)
        self.request_id = f"request-{self.trace_id.hex()}"
        self.text = ""
        data: Any = message
        if isinstance(message, pb.GenerateRequest):
            if message.HasField("request_id"):
                self.request_id = message.request_id
            message.request_id = self.request_id
            data = _encoded(style, message, credit)
        traceparent = f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01"
        options: dict[str, Any] = {
            "timeout": timeout_s,
            "metadata": (("traceparent", traceparent), *metadata),
        }
        path = f"/{SERVICE}/{style}"
        self.call: Any
        # Without serialisers, which the stubs of grpc cannot report.
        raw: Any = channel
        if style == "Generate":
            self.call = raw.unary_stream(path)(data, **options)
        elif style == "GenerateOnce":
            self.call = raw.unary_unary(path)(data, **options)
        else:
            self.call = raw.stream_stream(path)(_once(data), **options)

    async def outcome(self) -> str:
        """Read to the end; return the name of the request's status."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                told = await self._read_to_end()
        except grpc.aio.AioRpcError:
            told = None
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
            told = None
        code: grpc.StatusCode = await self.call.code()
        return code.name if told is None else told

    async def _read_to_end(self) -> str | None:
        if self.style == "GenerateOnce":
            answer = pb.GenerateOnceResponse.FromString(await self.call)
            self.text = "".join(output.text for output in answer.outputs)
            return None
        told = None
        while (data := await self.call.read()) is not grpc.aio.EOF:
            if self.style == "Generate":
                self.text += pb.GenerateResponse.FromString(data).tokens.text
                continue
            for event in pb.MultiplexResponse.FromString(data).events:
                self.text += event.response.tokens.text
                if event.WhichOneof("outcome") == "error":
                    told = _NAMES[event.error.code]
                elif event.response.WhichOneof("event") == "finished":
                    told = "OK"
        return told


@dataclass(frozen=True)
class Expected:
    """The expected content of a request's trace. `attributes`: of spans, by name ("" is the root).

    `or_children`: alternatives where two ends race.
    """

    code: str
    reason: str = ""
    children: tuple[str, ...] | None = None
    attributes: Mapping[str, Mapping[str, object]] = field(
        default_factory=dict[str, dict[str, object]]
    )
    or_children: tuple[str, ...] | None = None


def check_traces(spans: Sequence[Span], expected: dict[str, tuple[TracedCall, Expected]]) -> None:
    """Raise AssertionError with all errors by request name."""
    traces: dict[bytes, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    problems: dict[str, str] = {}
    for name, (call, wanted) in expected.items():
        try:
            _check_trace(traces.pop(call.trace_id, []), call, wanted)
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
    told = attributes_of(root.attributes)
    assert told[keys.RPC_STATUS] == wanted.code, told
    assert told.get(keys.ERROR_REASON, "") == wanted.reason, told
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
        told = attributes_of(span.attributes)
        assert {key: told.get(key) for key in attributes} == attributes, told


async def until_listed(
    operations: OperationsClient, calls: Sequence[TracedCall], state: RequestState
) -> None:
    """Return once operators see all calls in that state; PENDING: with a wait reason too."""
    wanted = {call.request_id for call in calls}
    async with asyncio.timeout(PATIENCE_S):
        async for _ in operations.watch_stats(interval_s=0.1):
            listed = await operations.list_requests()
            if wanted <= {one.request_id for one in listed if _is_settled(one, state)}:
                return
            ended = [f"{call.style}: {await call.outcome()}" for call in calls if call.call.done()]
            assert not ended, f"ended before they were {state.name}: {', '.join(ended)}"
    raise AssertionError("they did not come to that")


def _is_settled(one: LiveRequest, state: RequestState) -> bool:
    # A step must have passed it over before it has a reason to wait.
    is_told_why = state is not RequestState.PENDING or one.wait_reason is not WaitReason.UNSPECIFIED
    return one.state is state and is_told_why


@contextlib.asynccontextmanager
async def cancelled_after(calls: Sequence[TracedCall]) -> AsyncGenerator[None]:
    """Cancel the calls at the end of the block."""
    try:
        yield
    finally:
        for call in calls:
            call.call.cancel()
        await asyncio.gather(*(call.outcome() for call in calls))


def _encoded(style: str, message: pb.GenerateRequest, credit: int | None) -> bytes:
    if style == "Generate":
        return message.SerializeToString()
    if style == "GenerateOnce":
        return pb.GenerateOnceRequest(generation=message).SerializeToString()
    command = pb.MultiplexRequest()
    command.submit.key = _KEY
    command.submit.generation.CopyFrom(message)
    if credit is not None:
        command.submit.num_credit_tokens = credit
    return command.SerializeToString()


async def _once(data: bytes) -> AsyncGenerator[bytes]:
    yield data


_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
