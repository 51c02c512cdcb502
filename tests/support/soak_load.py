"""The clients of a soak: their requests, how they read, and the expected output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from penstock.executor.models import resolve_model
from penstock.executor.simulated.tokens import origin_of, tokens_at
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import state_pb2
from support.service import PATIENCE_S
from support.soak_plan import HUNG, OK, Kind, Ledger, Outcome, SoakPlan
from support.stepped_service import ids_of, request

# What every prompt of a soak must be answered with, token for token.

Prompt = tuple[int, ...]
NUM_CANARIES = 5
_FIRST_USUAL, _LAST_USUAL = 50, 900
_NUM_MEASURED = 24
_MOST_TRIED = 200
_CLOSE = 0.01
"""Difference of two log probabilities whose order rounding may exchange, many times over."""


def vocab_size() -> int:
    """Return the vocabulary size of the demo model."""
    config = json.loads((resolve_model("demo") / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


class Reference(Protocol):
    """Prompts, and their expected outputs."""

    def draw(self, chance: random.Random) -> Prompt:
        """Return a prompt for a usual request."""
        ...

    def canary(self, number: int) -> Prompt:
        """Return one of the prompts that are sent repeatedly."""
        ...

    def tokens(self, prompt: Prompt, count: int) -> list[int]:
        """Return the first `count` output tokens."""
        ...


class SimulatedReference:
    """Accepts any prompt."""

    def __init__(self) -> None:
        self._vocab_size = vocab_size()

    def draw(self, chance: random.Random) -> Prompt:
        return tuple(
            chance.randint(_FIRST_USUAL, _LAST_USUAL) for _ in range(chance.randint(4, 60))
        )

    def canary(self, number: int) -> Prompt:
        return tuple(range(60 + number, 100 + number))

    def tokens(self, prompt: Prompt, count: int) -> list[int]:
        origin = np.array([origin_of(np.array(prompt, dtype=np.int32))], dtype=np.uint64)
        positions = np.arange(len(prompt), len(prompt) + count, dtype=np.int64)
        return [int(token) for token in tokens_at(origin, positions, self._vocab_size)]


class MeasuredReference:
    """A few prompts with the outputs of the model measured without faults."""

    def __init__(self, known: dict[Prompt, list[int]]) -> None:
        self._known = known
        self._prompts = list(known)

    def draw(self, chance: random.Random) -> Prompt:
        return chance.choice(self._prompts)

    def canary(self, number: int) -> Prompt:
        return self._prompts[number % NUM_CANARIES]

    def tokens(self, prompt: Prompt, count: int) -> list[int]:
        return self._known[prompt][:count]


async def measured(channel: grpc.aio.Channel, max_tokens: int, seed: int) -> MeasuredReference:
    """Send prompts one after another to an idle service; return the reference."""
    chance = random.Random(seed)
    stub = pb_grpc.GenerationServiceStub(channel)
    known: dict[Prompt, list[int]] = {}
    for _ in range(_MOST_TRIED):
        if len(known) == _NUM_MEASURED:
            return MeasuredReference(known)
        prompt: Prompt = tuple(chance.randint(_FIRST_USUAL, _LAST_USUAL) for _ in range(12))
        message = request(max_tokens, prompt)
        message.output.logprobs = 2
        responses = [r async for r in stub.Generate(message, timeout=PATIENCE_S)]
        if _is_decided(responses):
            known[prompt] = ids_of(responses)
    raise AssertionError("the model is never sure of itself: there is no reference")


def _is_decided(responses: Sequence[pb.GenerateResponse]) -> bool:
    """Return whether no token's probability was close to another's, so rounding cannot change
    it.
    """
    return all(
        record.top_logprobs[0].logprob - record.top_logprobs[1].logprob > _CLOSE
        for response in responses
        if response.WhichOneof("event") == "tokens"
        for record in response.tokens.records
    )


def marked(prompt: Sequence[int], token: int) -> Prompt:
    """Return the prompt with a token that no client draws."""
    return (*prompt, token)


# One request of a soak: through refusals, lost connections and lost processes to its end.

GRACE_S = 30
MOST_S = 90.0
"""Longest time of one request in seconds; a longer one hangs."""
_LONGEST_WAIT_S = 2.0
_USUAL_WAIT_S = 0.2


class Lines:
    """Connections to a service; a lost one is replaced."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._channels = [self._connect() for _ in range(count)]

    def stub(self, chance: random.Random) -> pb_grpc.GenerationServiceAsyncStub:
        """Return a stub over any of the connections."""
        return pb_grpc.GenerationServiceStub(chance.choice(self._channels))

    @property
    def first(self) -> grpc.aio.Channel:
        return self._channels[0]

    async def lose_half(self) -> None:
        """Close every second connection, whatever runs over it."""
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
    """Return the reason in a status, "" if it has none, and the retry delay if there is one."""
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
    """`reference`: the complete expected output. `leaves_after`: messages until it disconnects,
    None: never.
    """

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
        """Run the request to its end; record the outcome in the ledger."""
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
        """Attempt until the request is over; return its error, "" if none."""
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
        """End the call; use Cancel where that is not enough."""
        self.leaves_after = None
        self._has_left = True
        if self.is_resumable:
            message = pb.CancelRequest(request_id=self.request_id)
            with contextlib.suppress(grpc.aio.AioRpcError):
                # It may have just ended, or the service may be unavailable: the stream shows which.
                await self.lines.stub(self.chance).Cancel(message, timeout=MOST_S)
        else:
            call.cancel()

    def take(self, message: pb.GenerateResponse) -> None:
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
        """Check a stream that ended with OK; return its error or OK."""
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
        """Return the cause if the request is over; else the delay, and whether to resume."""
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
        # gRPC reports a call over a closing connection this way.
        is_lost = code is grpc.StatusCode.CANCELLED and not reason
        if code is not grpc.StatusCode.UNAVAILABLE and not is_lost:
            return name
        self.num_refusals += 1
        return self._after_loss(reason, wait_s, is_resuming=is_resuming)

    def _after_loss(
        self, reason: str, wait_s: float, *, is_resuming: bool
    ) -> str | tuple[float, bool]:
        """Handle UNAVAILABLE: with a reason the service sent it, without one the connection was
        lost.
        """
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


# The clients of a soak: steady streams, bursts, canaries, and processes to be struck.

TESTS = Path(__file__).resolve().parents[1]
POISON, DEADLY = 21, 22
"""Tokens of a prompt: the first fails its request alone, the second ends the engine process."""
CANARY_TOKENS = 32
_READY_S = 60.0


class Load:
    """All clients. `run` returns when `seconds` are over and all requests have ended."""

    def __init__(self, plan: SoakPlan, lines: Lines, reference: Reference, ledger: Ledger) -> None:
        self.plan = plan
        self.lines = lines
        self.ledger = ledger
        self.holders: list[asyncio.subprocess.Process] = []
        self._reference = reference
        self._until_s = time.monotonic() + plan.seconds
        self._num_canaries = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    async def run(self) -> None:
        """Run steady streams, bursts and canaries concurrently."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.num_streams):
                group.create_task(self._stream(random.Random(f"{self.plan.seed}/{number}")))
            group.create_task(self._bursts(random.Random(f"{self.plan.seed}/bursts")))
            group.create_task(self._canaries())

    async def canary(self) -> Outcome:
        """Send a prompt whose output is known."""
        number, self._num_canaries = self._num_canaries, self._num_canaries + 1
        prompt = self._reference.canary(number % NUM_CANARIES)
        return await self._call(Kind.CANARY, prompt, CANARY_TOKENS, number, is_resumable=True).run()

    async def deadly(self) -> Outcome:
        """Send a request that ends the engine process whenever it gets its fourth token."""
        prompt = marked(self._reference.canary(0), DEADLY)
        return await self._call(Kind.DEADLY, prompt, CANARY_TOKENS, 0, is_resumable=False).run()

    async def hold(self, address: str) -> asyncio.subprocess.Process:
        """Start a client process with running streams; the caller kills or stops it."""
        paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "support.stream_holder", address, str(self.plan.num_held)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.holders.append(process)
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError):
            # It may be refused, or lose its engine: it is struck all the same.
            async with asyncio.timeout(_READY_S):
                await process.stdout.readline()
        return process

    def _call(
        self, kind: Kind, prompt: Prompt, num_tokens: int, seed: int, *, is_resumable: bool
    ) -> SoakCall:
        return SoakCall(
            kind=kind,
            prompt=prompt,
            reference=self._reference.tokens(prompt, num_tokens),
            is_resumable=is_resumable,
            lines=self.lines,
            ledger=self.ledger,
            chance=random.Random(f"{kind}/{seed}"),
        )

    async def _stream(self, chance: random.Random) -> None:
        while not self.is_over:
            kind = self._draw_kind(chance)
            prompt = self._reference.draw(chance)
            if kind is Kind.POISON:
                prompt = marked(prompt, POISON)
            num_tokens = chance.randint(self.plan.min_tokens, self.plan.max_tokens)
            is_resumable = chance.random() < self.plan.resumable_share and kind is not Kind.POISON
            seed = chance.getrandbits(32)
            call = self._call(kind, prompt, num_tokens, seed, is_resumable=is_resumable)
            if kind is Kind.CANCEL:
                call.leaves_after = chance.randint(0, num_tokens // 2)
            call.reads_slowly = kind is Kind.SLOW
            await call.run()

    def _draw_kind(self, chance: random.Random) -> Kind:
        plan = self.plan
        draw = chance.random()
        for kind, share in (
            (Kind.CANCEL, plan.cancel_share),
            (Kind.SLOW, plan.slow_share),
            (Kind.POISON, 0.0 if plan.is_torch else plan.poison_share),
        ):
            if draw < share:
                return kind
            draw -= share
        return Kind.STEADY

    async def _bursts(self, chance: random.Random) -> None:
        while True:
            await self._pause(self.plan.burst_every_s)
            if self.is_over:
                return
            calls = [
                self._call(
                    Kind.BURST,
                    self._reference.draw(chance),
                    self.plan.min_tokens,
                    chance.getrandbits(32),
                    is_resumable=True,
                )
                for _ in range(self.plan.burst_size)
            ]
            await asyncio.gather(*(call.run() for call in calls))

    async def _canaries(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self.is_over:
                group.create_task(self.canary())
                await self._pause(self.plan.canary_every_s)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, min(seconds, self._until_s - time.monotonic())))

    async def end_holders(self) -> None:
        for process in self.holders:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.communicate()


@contextlib.asynccontextmanager
async def loaded(load: Load) -> AsyncGenerator[Load]:
    """Provide the load; none of its processes is left after the block."""
    try:
        yield load
    finally:
        await load.end_holders()
        await load.lines.close()
