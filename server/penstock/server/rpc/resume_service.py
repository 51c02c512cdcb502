"""Resume, and what Generate does differently for a request that may be resumed.

Owns the path of such calls, and the account of a request that outlives the call that brought it: it
is closed when the request is over. How long and how much is kept is the front's business.
"""

import functools
from collections.abc import Iterable

from penstock.server.front.adoption import Adoptions, Wanted
from penstock.server.front.errors import ErrorReason, RequestError, refuse, refuse_feature
from penstock.server.front.events import StreamEvent
from penstock.server.front.front import Front
from penstock.server.front.generation import Generation
from penstock.server.front.inheriting import AlreadyTold
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.message_log import MessageLog
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.front.resumable import Resumable, Untold
from penstock.server.front.tenants import PriorityCeilings
from penstock.server.link.claims import ClaimPort
from penstock.server.link.resume_frames import Keepsake
from penstock.server.rpc.handlers import CallFailed, Context
from penstock.server.rpc.log_delivery import LogDelivery, deliver, refuse_sequence
from penstock.server.rpc.mapping_in.generation import check_request_id, read_generation
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import ResponseEncoder, encoder_for
from penstock.server.rpc.multiplex_encoding import varint
from penstock.server.rpc.outcomes import CANCELLED, OK, outcome_of
from penstock.server.rpc.parsing import parse
from penstock.server.security.rights import Caller
from penstock.v1 import generation_service_pb2 as pb

FEATURE = "resume"
_RESPONSE = b"\x0a"  # ResumeResponse.response


class ResumeService:
    """The handler, over one front."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._adoptions = Adoptions(front, FrontReviver(front))

    def hear_claims(self) -> None:
        """An engine is there: answer what other fronts ask over it."""
        if isinstance(self._front.port, ClaimPort):
            self._front.port.on_asked(self._adoptions)

    async def serve(
        self,
        live: LiveRequest,
        context: Context,
        account: RequestAccount,
    ) -> None:
        """Deliver a request that was opened; it stays when the call ends. Raises RequestError."""
        front = self._front
        encoder = encoder_for(live.generation.output.chunks, front.config, front.text.token_bytes)
        resumable = resumable_of(front, live, encoder)
        delivery = LogDelivery(resumable, 0, front.clock)
        resumable.take_over(delivery)
        front.resumptions.add(resumable)
        account.share(delivery)
        try:
            await deliver(delivery, resumable, front.resumptions, context.write)
        finally:
            account.num_messages = delivery.num_writes
            hand_on(front, resumable, account)

    async def resume(self, data: bytes, context: Context, caller: Caller) -> None:
        """Deliver the rest of a request's stream, from the message that is asked for."""
        front = self._front
        if not front.config.max_resume_grace_s:
            raise refuse_feature(FEATURE)
        message = parse(pb.ResumeRequest, data)
        violations = Violations()
        check_request_id("request_id", message.request_id, violations)
        if len(message.received_token_counts) > front.config.max_num_outputs:
            violations.add(
                "received_token_counts",
                f"must have at most {front.config.max_num_outputs} entries",
            )
        violations.raise_if_any()
        try:
            resumable = await self._find(message, caller)
            await self._deliver(resumable, message.next_sequence, context)
        except RequestError as error:
            raise CallFailed(error.refusal, message.request_id) from None

    async def _find(self, message: pb.ResumeRequest, caller: Caller) -> Resumable:
        """The request, here and from the message that is asked for. Raises RequestError."""
        wanted = Wanted(
            request_id=message.request_id,
            tenant=caller.tenant,
            ceilings=caller.ceilings,
            next_sequence=message.next_sequence,
            num_received=tuple(message.received_token_counts),
        )
        found = self._front.resumptions.find(wanted.request_id, wanted.tenant)
        if found is None:
            found = await self._adoptions.fetch(wanted)
        if found is None:
            raise refuse(ErrorReason.REQUEST_NOT_FOUND)
        found.fill()
        if wanted.next_sequence < found.log.began_at:
            found = await self._adoptions.begin_again(found, wanted) or found
        if not found.log.has(wanted.next_sequence):
            raise refuse_sequence(found.log)
        return found

    async def _deliver(self, resumable: Resumable, sequence: int, context: Context) -> None:
        front = self._front
        delivery = LogDelivery(resumable, sequence, front.clock)

        async def write(message: bytes) -> None:
            await context.write(b"".join((_RESPONSE, varint(len(message)), message)))

        # It may have nothing to tell for a long time: its client knows by this that it stands.
        await context.send_initial_metadata(())
        await deliver(delivery, resumable, front.resumptions, write)


class FrontReviver:
    """The `Reviver` of a front: requests and messages as protobuf."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def generation(
        self, message: bytes, request_id: str, tenant: str, ceilings: PriorityCeilings
    ) -> Generation:
        """See `Reviver`."""
        request = parse(pb.GenerateRequest, message)
        request.request_id = request_id
        front = self._front
        return read_generation(
            request,
            front.current_limits(),
            front.model_names,
            tenant=tenant,
            ceilings=ceilings,
        )

    def resumable(self, live: LiveRequest, log: MessageLog, told: AlreadyTold) -> Resumable:
        """See `Reviver`."""
        encoder = encoder_for(
            live.generation.output.chunks, self._front.config, self._front.text.token_bytes
        )
        encoder.sequence = log.next_sequence
        return resumable_of(self._front, live, encoder, log=log, untold=told.untold)

    def ended(self, log: MessageLog, kept: Keepsake, tenant: str) -> Resumable:
        """See `Reviver`."""
        resumable = Resumable(
            None,
            log,
            request_id=kept.request_id,
            tenant=tenant,
            grace_s=kept.grace_s,
            keepsake=kept.message,
            encode=_nothing,
            on_change=self._front.resumptions.on_change,
        )
        resumable.again = kept if kept.message else None
        return resumable


def _nothing(batch: Iterable[StreamEvent]) -> Iterable[bytes]:
    del batch
    return ()


def resumable_of(
    front: Front,
    live: LiveRequest,
    encoder: ResponseEncoder,
    *,
    log: MessageLog | None = None,
    untold: Untold | None = None,
) -> Resumable:
    """What keeps a live request for Resume; its generation must have a resumption.

    `encoder` makes its messages, the next of which is the next of `log`. `untold`: see `Resumable`.
    """
    resumption = live.generation.resumption
    assert resumption is not None
    return Resumable(
        live,
        log or MessageLog(),
        request_id=live.request_id,
        tenant=live.tenant,
        grace_s=resumption.grace_s,
        keepsake=resumption.keepsake,
        encode=encoder.encode,
        on_change=front.resumptions.on_change,
        untold=untold,
    )


def hand_on(front: Front, resumable: Resumable, account: RequestAccount) -> None:
    """The call that brought a request is over: the account of one that is not stays open."""
    if resumable.live is not None:
        account.is_handed_on = True
        resumable.on_over = functools.partial(_close, front, resumable, account)


def _close(front: Front, resumable: Resumable, account: RequestAccount) -> None:
    front.close_account(account, outcome_of_log(resumable.log))


def outcome_of_log(log: MessageLog) -> Outcome:
    """How the request of a log ended, whoever has read of it."""
    if not log.is_ended:
        return CANCELLED
    return OK if log.refusal is None else outcome_of(log.refusal)
