"""GenerationService: Generate, GenerateOnce and Cancel. Multiplex and Resume have their own
modules, `multiplex_service.py` and `resume_service.py`.

Owns the path of one call: parse, map, open, write, release.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import grpc

from penstock.server.front.errors import RequestError
from penstock.server.front.front import Front
from penstock.server.front.request_account import RequestAccount
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.call_opening import begin_call, open_request
from penstock.server.rpc.delivery import deliver
from penstock.server.rpc.handlers import CallFailed, Context, HandlerWrapper
from penstock.server.rpc.large_messages import LargeMessageTurns
from penstock.server.rpc.mapping_in.generation import check_request_id, valid_request_id
from penstock.server.rpc.mapping_in.output import check_no_chunks
from penstock.server.rpc.mapping_in.resume import check_not_resumable
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import encoder_for
from penstock.server.rpc.multiplex_service import MultiplexService
from penstock.server.rpc.once_encoding import OnceEncoder
from penstock.server.rpc.parsing import parse, parse_request
from penstock.server.rpc.request_accounts import CallAccounts
from penstock.server.rpc.resume_service import ResumeService
from penstock.server.security.rights import Caller
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2

SERVICE_NAME = "penstock.v1.GenerationService"
_MAX_TURN_S: Final = 0.002
_LARGE_BYTES: Final = 1 << 20
T = TypeVar("T")


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
        except RequestError as error:
            raise CallFailed(error.refusal, request.request_id) from None
        finally:
            self._front.release(request)

    async def generate_once(self, data: bytes, context: Context, account: RequestAccount) -> bytes:
        """Return all outputs of one request in one message."""
        times = begin_call(context, account)
        once, refusal = parse_request(pb.GenerateOnceRequest, data)
        message = once.generation
        del data
        self._accounts.describe(account, message, is_stream=False)
        try:
            check_no_chunks(message)
            check_not_resumable(message)
        except RequestError as error:
            account.request_id = valid_request_id(message)
            raise CallFailed(error.refusal, account.request_id) from None
        request = await open_request(self._front, message, times, account, refusal)
        # What the loop has not come to encode is not what a client leaves unread.
        request.is_catching_up = True
        encoder = OnceEncoder(self._front.text.token_bytes)
        turns = LoopTurns()
        try:
            while batch := await request.stream.take():
                await turns.make(encoder.add(batch))
        except RequestError as error:
            raise CallFailed(error.refusal, request.request_id) from None
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


class LoopTurns:
    """Makes the parts of one response and yields to the event loop if that takes long.

    One clock for all of them: a stream whose events are all there gives them without a turn.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    async def make(self, parts: Iterator[T]) -> list[T]:
        """All of these."""
        made: list[T] = []
        for part in parts:
            made.append(part)
            if time.perf_counter() - self._began_s > _MAX_TURN_S:
                await asyncio.sleep(0)
                self._began_s = time.perf_counter()
        return made
