"""The method Resume: attaches a request's stream and delivers what its client has not received."""

from collections.abc import Iterator, Sequence

from penstock.server.front import events
from penstock.server.front.attachments import Attachments, Received, received
from penstock.server.front.errors import RequestError, refuse_feature
from penstock.server.front.front import Front
from penstock.server.front.generation import Generation
from penstock.server.front.live_request import LiveRequest
from penstock.server.rpc.generation_call import deliver
from penstock.server.rpc.handlers import CallFailed, Context
from penstock.server.rpc.mapping_in.generation import (
    check_request_id,
    read_generation,
    valid_request_id,
)
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import ResponseEncoder, encoder_for, varint
from penstock.server.rpc.parsing import parse
from penstock.server.security.rights import Caller
from penstock.server.tenants import PriorityCeilings
from penstock.v1 import generation_service_pb2 as pb

_RESPONSE = b"\x0a"  # ResumeResponse.response


class ResumeService:
    """Its handler, over one front."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._attachments = Attachments(front, self._read)

    def on_engine(self) -> None:
        """An engine has connected: release requests that other fronts attach."""
        if self._front.port is not None:
            self._front.port.on_detached(self._attachments.on_detached)

    async def resume(self, data: bytes, context: Context, caller: Caller) -> None:
        """Deliver the rest of a request's stream, after the tokens that were received."""
        front = self._front
        if not front.config.max_resume_grace_s:
            raise refuse_feature("resume")
        message = parse(pb.ResumeRequest, data)
        violations = Violations()
        check_request_id("request_id", message.request_id, violations)
        if len(message.received_token_counts) > front.config.max_num_outputs:
            violations.add(
                "received_token_counts",
                f"must have at most {front.config.max_num_outputs} entries",
            )
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
            raise CallFailed(error.refusal, valid_request_id(message)) from None

    async def _deliver(
        self,
        request: LiveRequest,
        message: pb.ResumeRequest,
        context: Context,
    ) -> None:
        front, generation = self._front, request.generation
        had = received(generation, message.next_sequence, message.received_token_counts)
        encoder = encoder_for(generation.output.chunks, front.config, front.text.token_bytes)
        encoder.sequence = message.next_sequence
        # It may take long before the first event: the client sees that the stream is open.
        await context.send_initial_metadata(())
        await deliver(front, request, _RestEncoder(encoder, request, had), context)

    def _read(
        self, message: bytes, request_id: str, tenant: str, ceilings: PriorityCeilings
    ) -> Generation:
        """See `ReadGeneration`."""
        request = parse(pb.GenerateRequest, message)
        request.request_id = request_id
        front = self._front
        return read_generation(
            request, front.known_limits(), front.model_names, tenant=tenant, ceilings=ceilings
        )


class _RestEncoder:
    """Encodes what a client has not received."""

    def __init__(self, encoder: ResponseEncoder, request: LiveRequest, had: Received) -> None:
        self._encoder = encoder
        self._request = request
        self._had = had

    def encode(self, batch: Sequence[events.StreamEvent]) -> Iterator[bytes]:
        """See `Encoder`."""
        self._request.is_catching_up = False
        for message in self._encoder.encode(self._had.rest_of(batch, self._request)):
            yield b"".join((_RESPONSE, varint(len(message)), message))
