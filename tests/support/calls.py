"""Calls of Generate, GenerateOnce and Multiplex with one request each, given as a message or as
bytes.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from penstock.client import LiveRequest, OperationsClient, RequestState, WaitReason
from penstock.v1 import generation_service_pb2 as pb
from support.timeout import TEST_TIMEOUT_S

SERVICE = "penstock.v1.GenerationService"
STYLES = ("Generate", "GenerateOnce", "Multiplex")
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class Call:
    """One request. Bytes are sent unchanged, and no response is read before `outcome` is called.

    `credit`: initial number of credit tokens of a Multiplex request. `text`: the text of all
    outputs read so far; `trace_id`: from the accepted event.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        style: str,
        message: pb.GenerateRequest | bytes,
        *,
        credit: int | None = None,
        **options: Any,
    ) -> None:
        self.style = style
        self.text = self.trace_id = ""
        data = message if isinstance(message, bytes) else _encoded(style, message, credit)
        path = f"/{SERVICE}/{style}"
        self.call: Any
        # Called without serialisers, which grpc's type stubs do not allow.
        raw: Any = channel
        if style == "Generate":
            self.call = raw.unary_stream(path)(data, **options)
        elif style == "GenerateOnce":
            self.call = raw.unary_unary(path)(data, **options)
        else:
            self.call = raw.stream_stream(path)(_once(data), **options)

    async def outcome(self) -> str:
        """Read to the end; return the name of the request's gRPC status."""
        reported = None
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                reported = await self._read_to_end()
        except grpc.aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
        code: grpc.StatusCode = await self.call.code()
        return reported or code.name

    async def _read_to_end(self) -> str | None:
        if self.style == "GenerateOnce":
            answer = pb.GenerateOnceResponse.FromString(await self.call)
            self.text = "".join(output.text for output in answer.outputs)
            return None
        reported = None
        while (data := await self.call.read()) is not grpc.aio.EOF:
            if self.style == "Generate":
                self._take(pb.GenerateResponse.FromString(data))
                continue
            for event in pb.MultiplexResponse.FromString(data).events:
                self._take(event.response)
                if event.WhichOneof("outcome") == "error":
                    reported = _NAMES[event.error.code]
                elif event.response.HasField("finished"):
                    reported = "OK"
        return reported

    def _take(self, response: pb.GenerateResponse) -> None:
        self.text += response.tokens.text
        self.trace_id = response.accepted.trace_id or self.trace_id


class TracedCall(Call):
    """One request in a new trace. A message without a request id gets one with the trace id."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        style: str,
        message: pb.GenerateRequest | bytes,
        *,
        timeout_s: float = TEST_TIMEOUT_S,
        credit: int | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.parent_trace_id, self.span_id = secrets.token_bytes(16), secrets.token_bytes(8)
        self.request_id = f"request-{self.parent_trace_id.hex()}"
        if isinstance(message, pb.GenerateRequest):
            self.request_id = message.request_id or self.request_id
            message.request_id = self.request_id
        traceparent = f"00-{self.parent_trace_id.hex()}-{self.span_id.hex()}-01"
        metadata = (("traceparent", traceparent), *metadata)
        super().__init__(
            channel, style, message, credit=credit, timeout=timeout_s, metadata=metadata
        )


async def until_listed(
    operations: OperationsClient, calls: Sequence[TracedCall], state: RequestState
) -> None:
    """Wait until the operations service lists all calls in `state` and, if `state` is PENDING, with
    a wait reason. Raises AssertionError if a call ends earlier.
    """
    wanted = {call.request_id for call in calls}
    async with asyncio.timeout(TEST_TIMEOUT_S):
        async for _ in operations.watch_stats(interval_s=0.1):
            listed = await operations.list_requests()
            if wanted <= {one.request_id for one in listed if _is_in_state(one, state)}:
                return
            ended = [f"{call.style}: {await call.outcome()}" for call in calls if call.call.done()]
            assert not ended, f"ended before they were {state.name}: {', '.join(ended)}"
    raise AssertionError("they did not come to that")


def _is_in_state(one: LiveRequest, state: RequestState) -> bool:
    # A request has no wait reason until a step has not admitted it.
    has_reason = state is not RequestState.PENDING or one.wait_reason is not WaitReason.UNSPECIFIED
    return one.state is state and has_reason


def _encoded(style: str, message: pb.GenerateRequest, credit: int | None) -> bytes:
    if style == "Generate":
        return message.SerializeToString()
    if style == "GenerateOnce":
        return pb.GenerateOnceRequest(generation=message).SerializeToString()
    submit = pb.MultiplexSubmit(key=7, generation=message, num_credit_tokens=credit)
    return pb.MultiplexRequest(submit=submit).SerializeToString()


async def _once(data: bytes) -> AsyncGenerator[bytes]:
    yield data
