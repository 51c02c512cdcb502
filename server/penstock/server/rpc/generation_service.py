"""Implements penstock.v1.GenerationService, except Multiplex, which is in `multiplex_service.py`.

The methods here are Generate, GenerateOnce, Resume and Cancel. Generate parses the message,
converts and validates it, opens the request, writes its stream, and releases the request.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import grpc

from penstock.server.front import events
from penstock.server.front.accounts import RequestAccount
from penstock.server.front.attachments import Attachments, ClientPosition, client_position
from penstock.server.front.errors import RequestError, unsupported_feature
from penstock.server.front.front import Front
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.live_request import LiveRequest
from penstock.server.rpc import service_names
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.generation_call import begin_call, deliver, open_request
from penstock.server.rpc.handlers import (
    CallAccounts,
    Context,
    HandlerWrapper,
    OtherRequestFailed,
)
from penstock.server.rpc.large_messages import LargeMessageQueue
from penstock.server.rpc.mapping_in.generation import (
    check_request_id,
    read_generation,
    valid_request_id,
)
from penstock.server.rpc.mapping_in.options import check_no_chunks, check_not_resumable
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import ResponseEncoder, encoder_for, varint
from penstock.server.rpc.multiplex_service import MultiplexService
from penstock.server.rpc.once_encoding import OnceEncoder
from penstock.server.rpc.parsing import parse, parse_request
from penstock.server.security.rights import Caller
from penstock.server.tenants import PriorityCeilings
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2

_MAX_SEQUENCE: Final = 2**63 - 1
"""Far above the number of messages of any stream, so that later numbers also fit into the field."""
_RESPONSE = b"\x0a"  # ResumeResponse.response

_MAX_SLICE_S: Final = 0.002
T = TypeVar("T")

_LARGE_BYTES: Final = 1 << 20


class GenerationService:
    """The handlers of GenerationService, for one gRPC server process. They raise RequestError or
    OtherRequestFailed if a request is rejected or fails.

    `access` authorises callers; if it is None, all callers are authorised. `large_messages` is the
    queue of large messages; if it is None, a new one is created. Only Multiplex uses them.
    """

    def __init__(
        self,
        front: Front,
        access: AccessControl | None = None,
        large_messages: LargeMessageQueue | None = None,
    ) -> None:
        self._front = front
        key = front.config.tenant_metadata_key
        self._access = access or AccessControl(tenant_metadata_key=key)
        self._large_messages = large_messages
        self._accounts = CallAccounts(front, service_names.GENERATION)
        self._resume = ResumeService(front)

    def handlers(self, wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
        """Return the gRPC handlers of all methods of the service, created with `wrapper`."""
        accounts = self._accounts
        multiplex = MultiplexService(
            self._front, wrapper, accounts, self._access, self._large_messages
        )
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": wrapper.stream_request("Generate", self.generate, accounts),
            "GenerateOnce": wrapper.unary_request("GenerateOnce", self.generate_once, accounts),
            "Cancel": wrapper.unary_with_caller("Cancel", self.cancel),
            "Resume": wrapper.stream_with_caller("Resume", self._resume.resume),
            "Multiplex": wrapper.bidirectional("Multiplex", multiplex.multiplex),
        }
        return grpc.method_handlers_generic_handler(service_names.GENERATION, methods)

    async def generate(self, data: bytes, context: Context, account: RequestAccount) -> None:
        """Stream the outputs of one request."""
        times = begin_call(context, account)
        message, failure = parse_request(pb.GenerateRequest, data)
        del data
        self._accounts.describe(account, message, is_stream=True)
        request = await open_request(self._front, message, times, account, failure)
        try:
            encoder = encoder_for(
                request.generation.output.chunks, self._front.config, self._front.text.token_bytes
            )
            await deliver(self._front, request, encoder, context)
        finally:
            self._front.release(request)

    async def generate_once(self, data: bytes, context: Context, account: RequestAccount) -> bytes:
        """Return all outputs of one request in one message."""
        times = begin_call(context, account)
        once, failure = parse_request(pb.GenerateOnceRequest, data)
        message = once.generation
        del data
        self._accounts.describe(account, message, is_stream=False)
        check_no_chunks(message)
        check_not_resumable(message)
        request = await open_request(self._front, message, times, account, failure)
        # A growing backlog does not mean that the client is slow, because nothing is sent before
        # the end.
        request.is_backlog_unlimited = True
        encoder = OnceEncoder(self._front.text.token_bytes)
        yielder = LoopYielder()
        try:
            while batch := await request.stream.take():
                await yielder.collect(encoder.add(batch))
        finally:
            self._front.release(request)
        account.num_messages = 1
        parts = await yielder.collect(encoder.parts())
        if sum(map(len, parts)) < _LARGE_BYTES:
            return b"".join(parts)
        # Joining this many bytes takes tens of milliseconds, and releases the GIL.
        return await asyncio.to_thread(b"".join, parts)

    async def cancel(self, data: bytes, context: Context, caller: Caller) -> bytes:
        """Cancel a live request of the caller's tenant by its id, and return the state that it had.
        Raises RequestError for an invalid id, and OtherRequestFailed if there is no such
        request."""
        del context
        message = parse(pb.CancelRequest, data)
        violations = Violations()
        check_request_id("request_id", message.request_id, violations)
        violations.raise_if_any()
        try:
            state = await self._front.cancel(message.request_id, caller.tenant)
        except RequestError as error:
            raise OtherRequestFailed(error.failure, message.request_id) from None
        response = pb.CancelResponse(state=state_pb2.RequestState.ValueType(state.value))
        return response.SerializeToString()


class LoopYielder:
    """Iterates over generators that do the work for one response, and yields to the event loop
    after every `_MAX_SLICE_S` seconds of work.

    Time is measured across calls of `collect`, because a stream whose events are all ready never
    waits, and would otherwise not yield.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    async def collect(self, parts: Iterator[T]) -> list[T]:
        """Iterate over `parts`, and return its items as a list."""
        made: list[T] = []
        for part in parts:
            made.append(part)
            if time.perf_counter() - self._began_s > _MAX_SLICE_S:
                await asyncio.sleep(0)
                self._began_s = time.perf_counter()
        return made


class ResumeService:
    """Implements Resume: continues the stream of a request in a new call, with the events that its
    client has not received."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._attachments = Attachments(front, self._read)

    async def resume(self, data: bytes, context: Context, caller: Caller) -> None:
        """Deliver the remaining stream of a request, after the tokens that the client has received.
        Raises RequestError if Resume is disabled or the message is malformed, and
        OtherRequestFailed, with the id of the request, for other errors."""
        front = self._front
        if not front.config.max_resume_timeout_s:
            raise unsupported_feature("resume")
        message = parse(pb.ResumeRequest, data)
        violations = Violations()
        check_request_id("request_id", message.request_id, violations)
        if len(message.received_token_counts) > front.config.max_num_outputs:
            violations.add(
                "received_token_counts",
                f"must have at most {front.config.max_num_outputs} entries",
            )
        if message.next_sequence > _MAX_SEQUENCE:
            violations.add("next_sequence", f"must be at most {_MAX_SEQUENCE}")
        try:
            violations.raise_if_any()
            request = await self._attachments.attach(
                message.request_id, caller.tenant, caller.ceilings
            )
            try:
                await self._deliver(request, message, context)
            finally:
                front.release(request)
        except RequestError as error:
            raise OtherRequestFailed(error.failure, valid_request_id(message)) from None

    async def _deliver(
        self,
        request: LiveRequest,
        message: pb.ResumeRequest,
        context: Context,
    ) -> None:
        front, generation = self._front, request.generation
        position = client_position(generation, message.next_sequence, message.received_token_counts)
        encoder = encoder_for(generation.output.chunks, front.config, front.text.token_bytes)
        encoder.sequence = message.next_sequence
        # The first event may take long, so send the headers to open the stream at the client.
        await context.send_initial_metadata(())
        await deliver(front, request, _ResumeEncoder(encoder, request, position), context)

    def _read(
        self, message: bytes, request_id: str, tenant: str, ceilings: PriorityCeilings
    ) -> GenerationSpec:
        """Parse and validate the original GenerateRequest of a resumed request, for
        `Attachments`."""
        request = parse(pb.GenerateRequest, message)
        request.request_id = request_id
        front = self._front
        return read_generation(
            request, front.known_limits(), front.model_names, tenant=tenant, ceilings=ceilings
        )


class _ResumeEncoder:
    """An `Encoder` of ResumeResponse messages. It leaves out the events that the client has already
    received, according to its `position` in the stream."""

    def __init__(
        self, encoder: ResponseEncoder, request: LiveRequest, position: ClientPosition
    ) -> None:
        self._encoder = encoder
        self._request = request
        self._position = position

    def encode(self, batch: Sequence[events.StreamEvent]) -> Iterator[bytes]:
        """Yield the messages of the events that the client has not received. Clears
        `is_backlog_unlimited` of the request, so that its number of unsent tokens is limited."""
        self._request.is_backlog_unlimited = False
        for message in self._encoder.encode(self._position.remaining_events(batch, self._request)):
            yield b"".join((_RESPONSE, varint(len(message)), message))
