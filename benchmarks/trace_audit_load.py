"""Sends the requests of the trace audit (`trace_audit.py`), and records how each of them ended.

Each request has a known trace id, and is sent so that it ends in one of the ways of `RequestKind`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from load import TIMEOUT_S as _TIMEOUT_S
from load import open_loop
from penstock.client import (
    NO_RETRY,
    Accepted,
    Client,
    PenstockError,
    TokenPrompt,
    Tokens,
    TraceContext,
)
from span_audit import SentRequest

GENERATE = "/penstock.v1.GenerationService/Generate"
_PROMPT_TOKENS = 24
_MALFORMED = b"\x0a\xff\xff\xff\x7fnot a message"


class RequestKind(enum.StrEnum):
    """How a request is meant to end."""

    WHOLE = "whole"
    ONCE = "once"
    """It completes, over GenerateOnce."""
    LEFT = "left"
    """Its client closes the stream after some tokens."""
    ABANDONED = "abandoned"
    """Its client cancels the call after some time, possibly before it was sent."""
    CANCELLED = "cancelled"
    """Cancelled by a call of Cancel."""
    DEADLINE = "deadline"
    """The request's deadline passes."""
    CALL_DEADLINE = "call deadline"
    """The call's deadline passes, possibly before the client has received anything."""
    BAD_FIELD = "bad field"
    UNKNOWN_MODEL = "unknown model"
    TOO_LONG = "too long"
    MALFORMED = "malformed"


_WEIGHTS = {
    RequestKind.WHOLE: 36,
    RequestKind.ONCE: 8,
    RequestKind.LEFT: 14,
    RequestKind.ABANDONED: 6,
    RequestKind.CANCELLED: 6,
    RequestKind.DEADLINE: 10,
    RequestKind.CALL_DEADLINE: 6,
    RequestKind.BAD_FIELD: 4,
    RequestKind.UNKNOWN_MODEL: 3,
    RequestKind.TOO_LONG: 3,
    RequestKind.MALFORMED: 4,
}
_NEVER_MULTIPLEXED = (RequestKind.MALFORMED,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """A request to send, with its intended end. `amount`: 0 to 1, determines a parameter of its
    end, such as the time of a cancel.
    """

    kind: RequestKind
    is_multiplexed: bool
    at_s: float
    trace_id: bytes
    parent_id: bytes
    num_tokens: int
    amount: float

    @property
    def trace(self) -> TraceContext:
        """The trace context to send in the request's metadata."""
        return TraceContext(traceparent=f"00-{self.trace_id.hex()}-{self.parent_id.hex()}-01")


@dataclass(slots=True, kw_only=True)
class Answers:
    """How all requests ended.

    `outcomes`: number of requests by kind and outcome. An outcome is "OK", "left" (the client
    disconnected), or the error's reason (its status, if it has no reason).
    """

    sent: list[SentRequest] = field(default_factory=list[SentRequest])
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def note(self, request: AuditRequest, outcome: str, *, is_answered: bool) -> None:
        """Record the outcome of a request, as its client observed it."""
        self.outcomes[request.kind.value, outcome] += 1
        self.sent.append(
            SentRequest(
                trace_id=request.trace_id, parent_id=request.parent_id, is_answered=is_answered
            )
        )


def make_requests(num: int, seed: int, rate_per_s: float) -> list[AuditRequest]:
    """Return `num` random requests at this rate; a third of the eligible ones use Multiplex."""
    rng = random.Random(seed)
    kinds = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=num)
    return [
        AuditRequest(
            kind=kind,
            is_multiplexed=kind not in _NEVER_MULTIPLEXED and rng.random() < 1 / 3,
            at_s=number / rate_per_s,
            trace_id=rng.randbytes(8) + (number + 1).to_bytes(8, "big"),
            parent_id=(number + 1).to_bytes(8, "big"),
            num_tokens=rng.randint(1, 40),
            amount=rng.random(),
        )
        for number, kind in enumerate(kinds)
    ]


async def drive(address: str, requests: Sequence[AuditRequest], max_prompt_tokens: int) -> Answers:
    """Send each request at its time, wait until all have ended, and return the outcomes."""
    answers = Answers()
    async with (
        Client(address, retry=NO_RETRY) as plain,
        Client(address, retry=NO_RETRY, multiplex=True) as multiplexed,
        grpc.aio.insecure_channel(address) as raw,
    ):

        async def send(request: AuditRequest) -> None:
            client = multiplexed if request.is_multiplexed else plain
            await _Sender(client, plain, raw, answers, max_prompt_tokens).send(request)

        await open_loop(requests, send)
    return answers


class _Sender:
    """Sends one request and records how it ended."""

    def __init__(
        self,
        client: Client,
        control: Client,
        raw: grpc.aio.Channel,
        answers: Answers,
        max_prompt_tokens: int,
    ) -> None:
        self._client = client
        self._control = control
        self._raw = raw
        self._answers = answers
        self._max_prompt_tokens = max_prompt_tokens
        self._is_answered = False

    async def send(self, request: AuditRequest) -> None:
        try:
            outcome = await self._outcome(request)
        except PenstockError as error:
            # Only Penstock's server sets reasons: errors without one come from the client or gRPC.
            self._is_answered |= error.reason != ""
            outcome = error.reason or error.code.name
        self._answers.note(request, outcome, is_answered=self._is_answered)

    async def _outcome(self, request: AuditRequest) -> str:
        match request.kind:
            case RequestKind.MALFORMED:
                return await self._send_malformed(request)
            case RequestKind.ABANDONED:
                task = asyncio.create_task(self._stream(request))
                done, _ = await asyncio.wait((task,), timeout=0.2 * request.amount)
                if done:
                    return task.result()
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    return await task
                return "left"
            case RequestKind.ONCE:
                ids = TokenPrompt(ids=_prompt(request, _PROMPT_TOKENS))
                await self._client.generate_once(
                    ids, deadline_s=_TIMEOUT_S, trace=request.trace, **_options(request)
                )
                self._is_answered = True
                return "OK"
            case _:
                return await self._stream(request)

    async def _stream(self, request: AuditRequest) -> str:
        is_long = request.kind is RequestKind.TOO_LONG
        ids = _prompt(request, self._max_prompt_tokens + 1 if is_long else _PROMPT_TOKENS)
        deadline_s = (
            0.02 + 0.4 * request.amount if request.kind is RequestKind.CALL_DEADLINE else _TIMEOUT_S
        )
        events = self._client.generate(
            TokenPrompt(ids=ids), deadline_s=deadline_s, trace=request.trace, **_options(request)
        )
        num_left, num_tokens = 1 + int(request.amount * request.num_tokens), 0
        async with contextlib.aclosing(events):
            async for event in events:
                self._is_answered = True
                if isinstance(event, Accepted) and request.kind is RequestKind.CANCELLED:
                    # The request may have ended meanwhile.
                    with contextlib.suppress(PenstockError):
                        await self._control.cancel(event.request_id)
                if isinstance(event, Tokens):
                    num_tokens += event.num_tokens
                    if request.kind is RequestKind.LEFT and num_tokens >= num_left:
                        return "left"
        return "OK"

    async def _send_malformed(self, request: AuditRequest) -> str:
        method: Any = self._raw.unary_stream(GENERATE)
        call = method(_MALFORMED, metadata=request.trace.metadata(), timeout=_TIMEOUT_S)
        code = await call.code()
        self._is_answered = code is grpc.StatusCode.INVALID_ARGUMENT
        name: str = code.name
        return name


def _prompt(request: AuditRequest, num_tokens: int) -> tuple[int, ...]:
    first = int.from_bytes(request.parent_id[-2:], "big")
    return tuple((first * 31 + place * 7) % 250 + 3 for place in range(num_tokens))


def _options(request: AuditRequest) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": request.num_tokens, "ignore_eos": True}
    if request.kind is RequestKind.BAD_FIELD:
        options["min_tokens"] = request.num_tokens + 1
    elif request.kind is RequestKind.UNKNOWN_MODEL:
        options["model"] = "nobody-has-this"
    elif request.kind is RequestKind.DEADLINE:
        options["total_timeout_s"] = 0.005 + 0.4 * request.amount
    return options
