"""One request of a soak: through refusals, lost connections and lost processes to its end.

Owns what a patient client does, as the contract asks it to: it comes back when it is reported to,
takes up a stream that broke, and checks every number and every token on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import state_pb2
from support.soak_ledger import HUNG, OK, Kind, Ledger, Outcome
from support.soak_reference import Prompt
from support.stepped_service import request

GRACE_S = 30
MOST_S = 90.0
"""For one request, whatever happens: beyond that it hangs."""
_LONGEST_WAIT_S = 2.0
_USUAL_WAIT_S = 0.2


class Lines:
    """Connections to a service; a lost one is replaced."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._channels = [self._connect() for _ in range(count)]

    def stub(self, chance: random.Random) -> pb_grpc.GenerationServiceAsyncStub:
        """Over any of them."""
        return pb_grpc.GenerationServiceStub(chance.choice(self._channels))

    @property
    def first(self) -> grpc.aio.Channel:
        return self._channels[0]

    async def lose_half(self) -> None:
        """Hang up on every second one, whatever runs over it."""
        for index in range(0, len(self._channels), 2):
            lost, self._channels[index] = self._channels[index], self._connect()
            await lost.close(None)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self._address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 500),
                ("grpc.enable_retries", 0),
            ],
        )


def told_by(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    """The reason in a status, "" if it has none, and when to come back, if at all."""
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    info, retry = ErrorInfo(), RetryInfo()
    has_retry = False
    if isinstance(details, bytes):
        for detail in Status.FromString(details).details:
            detail.Unpack(info)
            has_retry |= detail.Unpack(retry)
    return info.reason, retry.retry_delay.ToMilliseconds() / 1000 if has_retry else None


@dataclass(slots=True, kw_only=True)
class SoakCall:
    """`reference`: what must be received, all of it. `leaves_after`: messages, None to stay."""

    kind: Kind
    prompt: Prompt
    reference: Sequence[int]
    is_resumable: bool
    lines: Lines
    ledger: Ledger
    chance: random.Random
    leaves_after: int | None = None
    reads_slowly: bool = False
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    received: list[int] = field(default_factory=list[int])
    next_sequence: int = 0
    first_token_s: float | None = None
    num_resumes: int = 0
    num_refusals: int = 0
    was_shed: bool = False
    _has_left: bool = False
    _end: Any = None

    async def run(self) -> Outcome:
        """To the end, which is noted in the ledger."""
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(MOST_S):
                cause = await self._attempts()
        except TimeoutError:
            cause = HUNG
        outcome = Outcome(
            kind=self.kind,
            cause=cause,
            begun_s=begun_s,
            ended_s=time.monotonic(),
            first_token_s=self.first_token_s,
            num_tokens=len(self.received),
            num_resumes=self.num_resumes,
            num_refusals=self.num_refusals,
            was_shed=self.was_shed,
        )
        self.ledger.add(outcome)
        return outcome

    async def _attempts(self) -> str:
        """Until it is over; why it is not as it should be, "" if it is."""
        is_resuming = False
        while True:
            call = self._resumed() if is_resuming else self._generated()
            try:
                await self._read(call)
            except grpc.aio.AioRpcError as error:
                again = self._after(error, is_resuming=is_resuming)
                if isinstance(again, str):
                    return again
                wait_s, is_resuming = again
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                if self._has_left:
                    return OK
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The connection was closed under it, by its own side.
                if not self.is_resumable:
                    return OK
                is_resuming = True
            else:
                return self._verdict()

    def _generated(self) -> Any:
        self.next_sequence = 0
        message = request(len(self.reference), self.prompt, request_id=self.request_id)
        if self.is_resumable:
            message.resume_timeout.FromSeconds(GRACE_S)
        return self.lines.stub(self.chance).Generate(message, timeout=MOST_S)

    def _resumed(self) -> Any:
        self.num_resumes += 1
        message = pb.ResumeRequest(
            request_id=self.request_id,
            next_sequence=self.next_sequence,
            received_token_counts=[len(self.received)],
        )
        return self.lines.stub(self.chance).Resume(message, timeout=MOST_S)

    async def _read(self, call: Any) -> None:
        num_read = 0
        async for message in call:
            self.take(message.response if isinstance(message, pb.ResumeResponse) else message)
            num_read += 1
            if self.leaves_after is not None and num_read > self.leaves_after:
                await self._leave(call)
            if self.reads_slowly and num_read < 10:
                await asyncio.sleep(0.3)

    async def _leave(self, call: Any) -> None:
        """By the end of the call, or by Cancel where that is not enough."""
        self.leaves_after = None
        self._has_left = True
        if self.is_resumable:
            message = pb.CancelRequest(request_id=self.request_id)
            with contextlib.suppress(grpc.aio.AioRpcError):
                # It may have just ended, or no client is there: the stream states which.
                await self.lines.stub(self.chance).Cancel(message, timeout=MOST_S)
        else:
            call.cancel()

    def take(self, message: pb.GenerateResponse) -> None:
        """One message, checked."""
        if message.sequence != self.next_sequence:
            self._wrong(f"message {message.sequence} in place of {self.next_sequence}")
        self.next_sequence = message.sequence + 1
        match message.WhichOneof("event"):
            case "tokens":
                if self.first_token_s is None and message.tokens.num_tokens:
                    self.first_token_s = time.monotonic()
                ids = [record.id for record in message.tokens.records]
                begin = len(self.received)
                self.received += ids
                if ids != list(self.reference[begin : len(self.received)]):
                    self._wrong(f"other tokens from {begin} on")
            case "finished":
                self._end = message.finished
            case _:
                pass

    def _wrong(self, what: str) -> None:
        self.ledger.wrong.append(
            f"{self.kind} {self.request_id}, resumed {self.num_resumes} times: {what}"
        )

    def _verdict(self) -> str:
        """Of a stream that ended with OK."""
        if self._end is None:
            return "OK without an end"
        (output,) = self._end.outputs
        if output.num_completion_tokens != len(self.received):
            self._wrong(f"{output.num_completion_tokens} tokens told, {len(self.received)} sent")
        is_cut = output.finish_reason == state_pb2.FINISH_REASON_CANCELLED
        if self._has_left and is_cut:
            return OK
        if len(self.received) != len(self.reference):
            return f"only {len(self.received)} of {len(self.reference)} tokens"
        return "was served" if self.kind in (Kind.POISON, Kind.DEADLY) else OK

    def _after(self, error: grpc.aio.AioRpcError, *, is_resuming: bool) -> str | tuple[float, bool]:
        """Its cause when it is over; else how long to wait, and whether to take it up again."""
        reason, retry_s = told_by(error)
        code = error.code()
        name = f"{code.name} {reason}".strip()
        if self._is_expected(code, reason):
            return OK
        wait_s = min(_LONGEST_WAIT_S, _USUAL_WAIT_S if retry_s is None else retry_s)
        if self.received and not is_resuming and reason:
            return f"{name} after {len(self.received)} tokens"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and reason != "READER_STALLED":
            if self.kind is Kind.BURST:
                self.was_shed = True
                return OK if retry_s is not None else f"{name} without RetryInfo"
            self.num_refusals += 1
            return wait_s, False
        if is_resuming and code is grpc.StatusCode.NOT_FOUND and not self.next_sequence:
            return wait_s, False  # it never arrived
        if code is grpc.StatusCode.ALREADY_EXISTS and self.is_resumable:
            return wait_s, True  # it did arrive
        # A caller that begins a call over a connection that is being closed is reported so.
        is_lost = code is grpc.StatusCode.CANCELLED and not reason
        if code is not grpc.StatusCode.UNAVAILABLE and not is_lost:
            return name
        self.num_refusals += 1
        return self._after_loss(reason, wait_s, is_resuming=is_resuming)

    def _after_loss(
        self, reason: str, wait_s: float, *, is_resuming: bool
    ) -> str | tuple[float, bool]:
        """Of UNAVAILABLE: with a reason it is the service's word, without one a lost connection."""
        if is_resuming:
            return wait_s, True
        if reason:
            return wait_s, False
        if self.is_resumable:
            return wait_s, True
        if self.received:
            return "connection lost"
        # Under its old id it may still be there.
        self.request_id = str(uuid.uuid4())
        return wait_s, False

    def _is_expected(self, code: grpc.StatusCode, reason: str) -> bool:
        if self._has_left and code is grpc.StatusCode.CANCELLED:
            return True
        if self.kind in (Kind.POISON, Kind.DEADLY):
            return code is grpc.StatusCode.INTERNAL
        return self.kind is Kind.SLOW and reason == "READER_STALLED"
