"""Attaches kept streams of the engine to this front, and detaches them.

Owns the path from an engine's answer to a live request: the request is started like a new one, then
its history is applied like other events, without the part that its client has received. Attaching
continues when the client disconnects, so that the request is not lost. Does not know gRPC: the
parser of a request is passed in.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.server.front.errors import ErrorReason, Refusal, RequestError, refuse
from penstock.server.front.events import Accepted, PromptPiece, StreamEvent, TokensPiece
from penstock.server.front.front import Front
from penstock.server.front.generation import Generation
from penstock.server.front.live_output import output_texts
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import CallTimes, submission_for
from penstock.server.link.frames import Attached, AttachFailure, EngineHello, ResumeSpec
from penstock.server.link.ports import EnginePort, EngineUnavailable
from penstock.server.link.step_frames import part_of
from penstock.server.tenants import PriorityCeilings, engine_request_id

SUPERSEDED: Final = Refusal(reason=ErrorReason.STREAM_SUPERSEDED)
_POLL_INTERVAL_S: Final = 0.05
"""Polling interval while waiting for an engine to have a request."""
_TOKENS_PER_TURN: Final = 256
"""Tokens of a history applied per iteration of the event loop: about a millisecond."""

ReadGeneration = Callable[[bytes, str, str, PriorityCeilings], Generation]
"""Parses a serialised request with the given id and tenant. Raises RequestError."""


@dataclass(slots=True, eq=False)
class _Attachment:
    """A request that is being attached: its events so far, and its engine's hello."""

    request: LiveRequest
    resume_spec: ResumeSpec
    keys: tuple[int, ...]
    events: deque[StepEvents]
    hello: EngineHello | None


class Attachments:
    """Attaches streams to one front."""

    def __init__(self, front: Front, read: ReadGeneration) -> None:
        self._front = front
        self._read = read
        self._attachments: set[_Attachment] = set()
        self._tasks: set[asyncio.Task[LiveRequest]] = set()

    async def attach(self, request_id: str, tenant: str, ceilings: PriorityCeilings) -> LiveRequest:
        """Return a tenant's request with its whole stream; the caller releases it.

        Without an engine, waits for one as long as requests do.

        Raises RequestError: REQUEST_NOT_FOUND, or the reason why it cannot be attached or found
        now.
        """
        due_s = self._front.clock() + self._front.config.max_replay_wait_s
        task = asyncio.create_task(self._attach(request_id, tenant, ceilings, due_s), name="attach")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._park)
            raise

    def on_detached(self, name: str, keys: tuple[int, ...]) -> None:
        """Detach a request that another front took over, or that was dropped. `name`: the engine's;
        `keys`: of its outputs.
        """
        front = self._front
        front.results.forget(name, keys)
        for request in {output.request for key in keys if (output := front.table.output(key))}:
            front.detach(request, SUPERSEDED)
        for attachment in tuple(self._attachments):
            if attachment.keys == keys:
                front.detach(attachment.request, SUPERSEDED)

    def _park(self, task: asyncio.Task[LiveRequest]) -> None:
        """Park the request: its caller has disconnected."""
        if not task.cancelled() and task.exception() is None:
            self._front.release(task.result())

    async def _attach(
        self, request_id: str, tenant: str, ceilings: PriorityCeilings, due_s: float
    ) -> LiveRequest:
        front = self._front
        name = engine_request_id(tenant, request_id)
        while True:
            port = await self._port(request_id, tenant, due_s)
            answers: list[_Attachment | RequestError | AttachFailure] = []

            def on_attached(
                answer: Attached,
                answers: list[_Attachment | RequestError | AttachFailure] = answers,
                port: EnginePort = port,
            ) -> None:
                answers.append(self._on_attached(answer, tenant, ceilings, port))

            with contextlib.suppress(EngineUnavailable):  # the engine was lost meanwhile
                await port.attach_stream(name, on_attached)
            match answers:
                case [_Attachment() as attachment]:
                    return await self._start(attachment)
                case [RequestError() as error]:
                    raise error
                case [AttachFailure.NOT_FOUND]:
                    raise refuse(ErrorReason.REQUEST_NOT_FOUND)
                case [AttachFailure.LOST]:
                    raise refuse_sequence()
                case _ if front.clock() >= due_s:
                    raise refuse(
                        ErrorReason.ENGINE_DOWN,
                        "not settled after an engine restart; try again",
                    )
                case _:
                    await asyncio.sleep(_POLL_INTERVAL_S)

    async def _port(self, request_id: str, tenant: str, due_s: float) -> EnginePort:
        """Return the port to an engine that has this front's requests. Raises RequestError."""
        front = self._front
        while True:
            port = front.port
            here = front.table.get(request_id, tenant)
            if here is not None and here.generation.resumption is None:
                raise refuse(ErrorReason.REQUEST_NOT_FOUND)
            is_ready = here is None or here.is_at_engine
            if port is not None and front.is_engine_up and is_ready:
                front.current_limits()
                return port
            if front.is_draining or not front.replays.are_on or front.clock() >= due_s:
                front.current_limits()
                raise refuse(ErrorReason.ENGINE_DOWN)
            if port is not None and not front.is_engine_up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_INTERVAL_S):
                        await port.wait_up()
            else:
                await asyncio.sleep(_POLL_INTERVAL_S)
            await asyncio.sleep(0)

    def _on_attached(
        self, answer: Attached, tenant: str, ceilings: PriorityCeilings, port: EnginePort
    ) -> "_Attachment | RequestError | AttachFailure":
        """Register the attached request: all its later events come to this front."""
        front, resume_spec = self._front, answer.resume_spec
        if resume_spec is None:
            return answer.failure
        name = engine_request_id(tenant, resume_spec.request_id)
        self.on_detached(name, answer.keys)
        try:
            generation = self._read(resume_spec.message, resume_spec.request_id, tenant, ceilings)
            request = LiveRequest(resume_spec.request_id, generation, resume_spec.arrival_s)
            front.table.add(request)
        except RequestError as error:
            port.detach((name,))
            return error
        events = front.attaching[request] = deque(frame.value() for frame in answer.history)
        attachment = _Attachment(request, resume_spec, answer.keys, events, front.hello)
        self._attachments.add(attachment)
        return attachment

    async def _start(self, attachment: _Attachment) -> LiveRequest:
        """Start the attached request: prompt, outputs and history."""
        front, request, resume_spec = self._front, attachment.request, attachment.resume_spec
        generation = request.generation
        try:
            limits = front.known_limits()
            prompt, prompt_text = await front.prompts.tokenise(generation, limits, is_replay=True)
            _raise_if_over(request)
            submission = submission_for(
                generation,
                prompt,
                limits=limits,
                times=CallTimes(
                    arrival_s=resume_spec.arrival_s, call_deadline_s=resume_spec.deadline_s
                ),
                request_id=request.request_id,
                keys=attachment.keys,
                seed=resume_spec.seed,
                eos_ids=front.text.files.eos_ids,
            )
            request.start(
                submission,
                output_texts(generation, front.text, submission.specs[0].stop_ids),
                model=front.model,
                prompt_text=prompt_text,
                now_s=resume_spec.arrival_s,
                has_content=front.accounts.has_content,
            )
            await self._catch_up(attachment)
        except BaseException:
            front.release(request)
            front.attaching.pop(request, None)
            raise
        finally:
            self._attachments.discard(attachment)
        front.finish_attach(request, attachment.hello is front.hello and front.is_engine_up)
        return request

    async def _catch_up(self, attachment: _Attachment) -> None:
        """Apply the history and the events that arrive meanwhile, a part per iteration of the loop.

        Raises RequestError.
        """
        request = attachment.request
        request.is_catching_up = True
        keys = set(attachment.keys)
        num_tokens = 0
        while attachment.events:
            events = attachment.events.popleft()
            rows = np.flatnonzero(np.isin(events.keys, attachment.keys))
            for part in _parts_of(part_of(events, keys.__contains__, rows)):
                self._front.apply_history(request, part)
                num_tokens += 1 + len(part.tokens)  # other events cost about as much as a token
                if num_tokens >= _TOKENS_PER_TURN:
                    num_tokens = 0
                    await asyncio.sleep(0)
                    _raise_if_over(request)


def _parts_of(events: StepEvents) -> Iterator[StepEvents]:
    """Split the events into parts of at most `_TOKENS_PER_TURN` tokens."""
    logprobs = events.logprobs
    while len(events.tokens) > _TOKENS_PER_TURN:
        now, later = slice(_TOKENS_PER_TURN), slice(_TOKENS_PER_TURN, None)
        yield replace(
            events,
            keys=events.keys[now],
            tokens=events.tokens[now],
            logprobs=None if logprobs is None else logprobs.take(now),
            ends=(),
        )
        logprobs = None if logprobs is None else logprobs.take(later)
        events = replace(
            events,
            keys=events.keys[later],
            tokens=events.tokens[later],
            logprobs=logprobs,
            prompt_logprobs=(),
            changes=(),
        )
    yield events


def _raise_if_over(request: LiveRequest) -> None:
    """Raise RequestError if the request was cancelled or another front has attached it."""
    if request.stream.refusal is not None:
        raise RequestError(request.stream.refusal)


@dataclass(slots=True, eq=False)
class Received:
    """What a client has received. `tokens`: how many of each output, by index.

    `closed`: outputs whose last text, which is held back until the output ends, was delivered with
    their last token, if that was delivered.
    """

    is_accepted: bool = False
    is_echoed: bool = False
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    closed: set[int] = field(default_factory=set[int])

    def rest_of(self, batch: Iterable[StreamEvent], live: LiveRequest) -> list[StreamEvent]:
        """Return the new part of a request's `batch`, whose pieces have at most one token each."""
        return [event for event in batch if self._is_new(event, live)]

    def _is_new(self, event: StreamEvent, live: LiveRequest) -> bool:
        match event:
            case Accepted():
                return not self.is_accepted
            case PromptPiece():
                return not self.is_echoed
            case TokensPiece() if (num_left := self.tokens.get(event.output_index, 0)) > 0:
                self.tokens[event.output_index] = num_left - event.num_tokens
                return False
            case TokensPiece() if event.output_index in self.closed:
                if not event.num_tokens and _ended_by_itself(live, event.output_index):
                    return False
                self.closed.discard(event.output_index)
                return True
            case _:
                return True


def received(generation: Generation, next_sequence: int, num_tokens: Sequence[int]) -> Received:
    """Return the position of a client that has `num_tokens` of each output and wants
    `next_sequence` next.

    Raises RequestError, SEQUENCE_UNAVAILABLE, for an inconsistent position: more outputs or tokens
    than possible, or a position inside the prompt.
    """
    most = generation.stopping.max_tokens
    fits = len(num_tokens) <= generation.sampling.num_outputs
    fits = fits and (most is None or max(num_tokens, default=0) <= most)
    output = generation.output
    if (output.echo or output.num_prompt_logprobs >= 0) and not any(num_tokens):
        fits = fits and next_sequence <= 1
    if not fits:
        raise refuse_sequence()
    counts = dict(enumerate(num_tokens))
    begun = {index for index, count in counts.items() if count}
    return Received(next_sequence > 0, next_sequence > 0 and bool(begun), counts, begun)


def refuse_sequence() -> RequestError:
    """Return the error for a position at which a stream cannot continue; it may restart from 0."""
    return refuse(ErrorReason.SEQUENCE_UNAVAILABLE, first_sequence="0", next_sequence="0")


def _ended_by_itself(live: LiveRequest, index: int) -> bool:
    """Return whether an output ended with its own last token, and was not truncated."""
    end = live.outputs[index].end
    return end is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH)
