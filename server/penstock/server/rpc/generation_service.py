"""GenerationService: Generate, GenerateOnce and Cancel; Resume and Multiplex have their own files.

Owns the path of one call: parse, map, open, write, release.
"""

import asyncio
from typing import Any, Final

import grpc

from penstock.server.front.accounts import RequestAccount
from penstock.server.front.errors import RequestError
from penstock.server.front.front import Front
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.generation_call import begin_call, deliver, open_request
from penstock.server.rpc.handlers import CallAccounts, CallFailed, Context, HandlerWrapper
from penstock.server.rpc.large_messages import LargeMessageTurns
from penstock.server.rpc.loop_turns import LoopTurns
from penstock.server.rpc.mapping_in.generation import (
    check_request_id,
)
from penstock.server.rpc.mapping_in.options import check_no_chunks, check_not_resumable
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import encoder_for
from penstock.server.rpc.multiplex_service import MultiplexService
from penstock.server.rpc.once_encoding import OnceEncoder
from penstock.server.rpc.parsing import parse, parse_request
from penstock.server.rpc.resume_service import ResumeService
from penstock.server.security.rights import Caller
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2

SERVICE_NAME = "penstock.v1.GenerationService"
_LARGE_BYTES: Final = 1 << 20


class GenerationService:
    """The handlers, over one front.

    `gate` and `turns` are for the requests of Multiplex; without them every caller is admitted and
    large messages do not queue.
    """

    def __init__(
        self,
        front: Front,
        gate: AccessControl | None = None,
        turns: LargeMessageTurns | None = None,
    ) -> None:
        self._front = front
        key = front.config.tenant_metadata_key
        self._gate = gate or AccessControl(tenant_metadata_key=key)
        self._turns = turns
        self._accounts = CallAccounts(front, SERVICE_NAME)
        self._resume = ResumeService(front)

    def handlers(self, wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
        """All methods of the service."""
        accounts = self._accounts
        multiplex = MultiplexService(self._front, wrapper, accounts, self._gate, self._turns)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": wrapper.stream_request("Generate", self.generate, accounts),
            "GenerateOnce": wrapper.unary_request("GenerateOnce", self.generate_once, accounts),
            "Cancel": wrapper.unary_with_caller("Cancel", self.cancel),
            "Resume": wrapper.stream_with_caller("Resume", self._resume.resume),
            "Multiplex": wrapper.bidirectional("Multiplex", multiplex.handle),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def on_engine(self) -> None:
        """An engine has connected: see `ResumeService`."""
        self._resume.on_engine()

    async def generate(self, data: bytes, context: Context, account: RequestAccount) -> None:
        """Stream the outputs of one request."""
        times = begin_call(context, account)
        message, refusal = parse_request(pb.GenerateRequest, data)
        del data
        self._accounts.describe(account, message, is_stream=True)
        request = await open_request(self._front, message, times, account, refusal)
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
        once, refusal = parse_request(pb.GenerateOnceRequest, data)
        message = once.generation
        del data
        self._accounts.describe(account, message, is_stream=False)
        check_no_chunks(message)
        check_not_resumable(message)
        request = await open_request(self._front, message, times, account, refusal)
        # What the loop has not come to encode is not what a client leaves unread.
        request.is_catching_up = True
        encoder = OnceEncoder(self._front.text.token_bytes)
        turns = LoopTurns()
        try:
            while batch := await request.stream.take():
                await turns.make(encoder.add(batch))
        finally:
            self._front.release(request)
        account.num_messages = 1
        parts = await turns.make(encoder.parts())
        if sum(map(len, parts)) < _LARGE_BYTES:
            return b"".join(parts)
        # Joining as many bytes takes tens of milliseconds and releases the GIL.
        return await asyncio.to_thread(b"".join, parts)

    async def cancel(self, data: bytes, context: Context, caller: Caller) -> bytes:
        """Cancel a live request of the caller's tenant by its id."""
        del context
        message = parse(pb.CancelRequest, data)
        violations = Violations()
        check_request_id("request_id", message.request_id, violations)
        violations.raise_if_any()
        try:
            state = await self._front.cancel(message.request_id, caller.tenant)
        except RequestError as error:
            raise CallFailed(error.refusal, message.request_id) from None
        response = pb.CancelResponse(state=state_pb2.RequestState.ValueType(state.value))
        return response.SerializeToString()
