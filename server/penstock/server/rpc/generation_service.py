"""GenerationService: Generate, GenerateOnce and Cancel. Multiplex and Resume are elsewhere:
`multiplex_service.py` and `resume_service.py`.

Owns the path of one call: parse, map, open, write, release. What is generated and how it ends is
the front's business.
"""

import asyncio
import functools
from typing import Any

import grpc

from penstock.scheduler.request import NO_TIME
from penstock.server.front import events
from penstock.server.front.errors import RequestError
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.request_account import RequestAccount
from penstock.server.front.submission import CallTimes
from penstock.server.rpc.gate import Gate
from penstock.server.rpc.handlers import CallFailed, Context, HandlerWrapper
from penstock.server.rpc.mapping_in.generation import (
    check_request_id,
    read_generation,
    valid_request_id,
)
from penstock.server.rpc.mapping_in.output import check_no_chunks
from penstock.server.rpc.mapping_in.resume import check_not_resumable
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import encoder_for, once_response
from penstock.server.rpc.multiplex_service import MultiplexService
from penstock.server.rpc.outcomes import call_timeout_s
from penstock.server.rpc.parsing import num_unknown_fields, parse
from penstock.server.rpc.request_accounts import CallAccounts
from penstock.server.rpc.resume_service import ResumeService
from penstock.server.security.rights import Right
from penstock.server.telemetry.trace_context import trace_metadata
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2

SERVICE_NAME = "penstock.v1.GenerationService"


class GenerationService:
    """The handlers, over one front. `gate` None: everybody may call."""

    def __init__(self, front: Front, gate: Gate | None = None) -> None:
        self._front = front
        key = front.config.tenant_metadata_key
        self._gate = gate or Gate(tenant_metadata_key=key)
        self._accounts = CallAccounts(front, SERVICE_NAME)
        self._resume = ResumeService(front, self._gate)

    def handlers(self, wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
        """All methods of the service."""
        accounts = self._accounts
        multiplex = MultiplexService(self._front, wrapper, accounts, self._gate)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": wrapper.stream_request("Generate", self.generate, accounts),
            "GenerateOnce": wrapper.unary_request("GenerateOnce", self.generate_once, accounts),
            "Cancel": wrapper.unary("Cancel", self.cancel),
            "Resume": wrapper.server_stream("Resume", self._resume.resume),
            "Multiplex": wrapper.bidirectional("Multiplex", multiplex.handle),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def hear_claims(self) -> None:
        """An engine is there: see `ResumeService`."""
        self._resume.hear_claims()

    async def generate(self, data: bytes, context: Context, account: RequestAccount) -> None:
        """Stream the outputs of one request."""
        times = self._begin(context, account)
        message = parse(pb.GenerateRequest, data)
        del data
        self._accounts.describe(account, message, is_stream=True)
        request = await self._open(message, times, account)
        if request.generation.resumption is not None:
            await self._deliver_resumable(request, context, account)
            return
        try:
            await self._deliver(request, context, account)
        except RequestError as error:
            raise CallFailed(error.refusal, request.request_id) from None
        finally:
            self._front.release(request)

    async def generate_once(self, data: bytes, context: Context, account: RequestAccount) -> bytes:
        """Answer one request as a whole."""
        times = self._begin(context, account)
        message = parse(pb.GenerateOnceRequest, data).generation
        del data
        self._accounts.describe(account, message, is_stream=False)
        try:
            check_no_chunks(message)
            check_not_resumable(message)
        except RequestError as error:
            account.request_id = valid_request_id(message)
            raise CallFailed(error.refusal, account.request_id) from None
        request = await self._open(message, times, account)
        collected: list[events.StreamEvent] = []
        try:
            while batch := await request.stream.take():
                collected.extend(batch)
            await self._tell_trace(context, account)
        except RequestError as error:
            raise CallFailed(error.refusal, request.request_id) from None
        finally:
            self._front.release(request)
        account.num_messages = 1
        return once_response(collected).SerializeToString()

    async def cancel(self, data: bytes, context: Context) -> bytes:
        """Cancel a live request of the caller's tenant by its id."""
        tenant = self._gate.admit(context, Right.CANCEL).tenant
        message = parse(pb.CancelRequest, data)
        violations = Violations()
        check_request_id("request_id", message.request_id, violations)
        violations.raise_if_any()
        try:
            state = await self._front.cancel(message.request_id, tenant)
        except RequestError as error:
            raise CallFailed(error.refusal, message.request_id) from None
        response = pb.CancelResponse(state=state_pb2.RequestState.ValueType(state.value))
        return response.SerializeToString()

    def _begin(self, context: Context, account: RequestAccount) -> CallTimes:
        """Whose request it is, and when its call arrived and must end. Raises RequestError."""
        account.call_timeout_s = call_timeout_s(context)
        caller = self._gate.admit(context, Right.GENERATE)
        account.tenant, account.max_priority = caller.tenant, caller.max_priority
        arrival_s = account.arrival_s
        deadline_s = min(arrival_s + account.call_timeout_s, NO_TIME)
        return CallTimes(arrival_s=arrival_s, call_deadline_s=deadline_s)

    async def _open(
        self, message: pb.GenerateRequest, times: CallTimes, account: RequestAccount
    ) -> LiveRequest:
        front = self._front
        try:
            generation = read_generation(
                message,
                front.current_limits(),
                front.model_names,
                tenant=account.tenant,
                max_priority=account.max_priority,
                trace_id=account.trace.trace_id,
            )
            front.counters.num_unknown_fields += num_unknown_fields(message)
            return await front.open(generation, times, account)
        except RequestError as error:
            account.request_id = valid_request_id(message)
            raise CallFailed(error.refusal, account.request_id) from None

    async def _tell_trace(self, context: Context, account: RequestAccount) -> None:
        """Say where the request can be looked up, before its first message and never sooner.

        Whoever has headers cannot try again: a refusal must come before them, so it brings its
        trace in its trailers.
        """
        if metadata := trace_metadata(account.trace):
            await context.send_initial_metadata(metadata)

    async def _deliver_resumable(
        self, request: LiveRequest, context: Context, account: RequestAccount
    ) -> None:
        """As for any other, but the request stays when the call ends."""
        tell_trace = functools.partial(self._tell_trace, context, account)
        try:
            await self._resume.serve(request, context, account, tell_trace)
        except RequestError as error:
            raise CallFailed(error.refusal, request.request_id) from None

    async def _deliver(
        self, request: LiveRequest, context: Context, account: RequestAccount
    ) -> None:
        """Write until the stream ends. Raises RequestError when it ends in failure."""
        stream = request.stream
        encoder = encoder_for(request.generation.output.chunks, self._front.config)
        clock = self._front.clock
        try:
            batch = await stream.take()
            await self._tell_trace(context, account)
            while batch:
                for message in encoder.encode(batch):
                    stream.begin_write(clock())
                    await context.write(message)
                    stream.end_write(clock())
                batch = await stream.take()
        except asyncio.CancelledError:
            # Either the peer left, or its reader stalled and we cut it off in mid-write.
            if stream.was_cut_off() and stream.refusal is not None:
                raise RequestError(stream.refusal) from None
            raise
