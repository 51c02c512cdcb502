"""GenerationService: Generate, GenerateOnce and Cancel; Multiplex is in `multiplex_service.py`.

Owns the path of one call: parse, map, open, write, release. What is generated and how it ends is
the front's business.
"""

import asyncio
import math
from dataclasses import replace
from typing import Any, cast

import grpc

from penstock.scheduler.request import NO_TIME
from penstock.server.front import events
from penstock.server.front.errors import RequestError
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import CallTimes
from penstock.server.rpc.caller import tenant_of
from penstock.server.rpc.handlers import CallFailed, Context, HandlerWrapper
from penstock.server.rpc.mapping_in.generation import (
    check_request_id,
    read_generation,
    valid_request_id,
)
from penstock.server.rpc.mapping_in.output import check_no_chunks
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import encoder_for, once_response
from penstock.server.rpc.multiplex_service import MultiplexService
from penstock.server.rpc.parsing import num_unknown_fields, parse
from penstock.server.rpc.unimplemented import unimplemented_handlers
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2

SERVICE_NAME = "penstock.v1.GenerationService"


class GenerationService:
    """The handlers, over one front."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def handlers(self, wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
        """All methods of the service."""
        multiplex = MultiplexService(self._front, wrapper)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": wrapper.server_stream("Generate", self.generate),
            "GenerateOnce": wrapper.unary("GenerateOnce", self.generate_once),
            "Cancel": wrapper.unary("Cancel", self.cancel),
            "Multiplex": wrapper.bidirectional("Multiplex", multiplex.handle),
            **unimplemented_handlers(SERVICE_NAME, wrapper),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def generate(self, data: bytes, context: Context) -> None:
        """Stream the outputs of one request."""
        times, tenant = self._times(context), self._tenant(context)
        request = await self._open(parse(pb.GenerateRequest, data), times, tenant)
        try:
            await self._deliver(request, context)
        except RequestError as error:
            raise CallFailed(error.refusal, request.request_id) from None
        finally:
            self._front.release(request)

    async def generate_once(self, data: bytes, context: Context) -> bytes:
        """Answer one request as a whole."""
        times, tenant = self._times(context), self._tenant(context)
        message = parse(pb.GenerateOnceRequest, data).generation
        try:
            check_no_chunks(message)
        except RequestError as error:
            raise CallFailed(error.refusal, valid_request_id(message)) from None
        request = await self._open(message, times, tenant)
        collected: list[events.StreamEvent] = []
        try:
            while batch := await request.stream.take():
                collected.extend(batch)
        except RequestError as error:
            raise CallFailed(error.refusal, request.request_id) from None
        finally:
            self._front.release(request)
        return once_response(collected).SerializeToString()

    async def cancel(self, data: bytes, context: Context) -> bytes:
        """Cancel a live request of the caller's tenant by its id."""
        tenant = self._tenant(context)
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

    def _tenant(self, context: Context) -> str:
        return tenant_of(context, self._front.config.tenant_metadata_key)

    def _times(self, context: Context) -> CallTimes:
        now_s = self._front.clock()
        # None without a deadline, whatever the stubs say.
        remaining_s = cast(float | None, context.time_remaining())
        if remaining_s is None or not math.isfinite(remaining_s):
            return CallTimes(arrival_s=now_s)
        return CallTimes(arrival_s=now_s, call_deadline_s=min(now_s + remaining_s, NO_TIME))

    async def _open(
        self, message: pb.GenerateRequest, times: CallTimes, tenant: str
    ) -> LiveRequest:
        front = self._front
        try:
            generation = replace(
                read_generation(message, front.current_limits(), front.model_names), tenant=tenant
            )
            front.counters.num_unknown_fields += num_unknown_fields(message)
            return await front.open(generation, times)
        except RequestError as error:
            raise CallFailed(error.refusal, valid_request_id(message)) from None

    async def _deliver(self, request: LiveRequest, context: Context) -> None:
        """Write until the stream ends. Raises RequestError when it ends in failure."""
        stream = request.stream
        encoder = encoder_for(request.generation.output.chunks, self._front.config)
        clock = self._front.clock
        try:
            while batch := await stream.take():
                for message in encoder.encode(batch):
                    stream.begin_write(clock())
                    await context.write(message)
                    stream.end_write()
        except asyncio.CancelledError:
            # Either the peer left, or its reader stalled and we cut it off in mid-write.
            if stream.was_cut_off() and stream.refusal is not None:
                raise RequestError(stream.refusal) from None
            raise
