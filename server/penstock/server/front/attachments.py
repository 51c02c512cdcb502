"""Takes over streams that the engine keeps for Resume (attaches them to this front, the gRPC server
process), and detaches a stream again if its client has disconnected meanwhile.

When the engine has responded, the front starts the request like a new one, and then applies its
history (the events so far) like other events. When the stream is read, `ClientPosition` removes the
events that the client has already received. Once the request for the stream has been sent to the
engine, attaching continues even if the client disconnects, so that the stream is not lost. Does not
use gRPC: the caller passes the parser of a request.
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
from penstock.server.front.errors import ErrorReason, RequestError, request_error
from penstock.server.front.events import Accepted, Finished, PromptPiece, StreamEvent, TokensPiece
from penstock.server.front.front import Front
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.kept_requests import Attachment
from penstock.server.front.live_output import output_texts
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import CallTimes, submission_for
from penstock.server.ipc.frames import Attached, AttachFailure
from penstock.server.ipc.ports import EnginePort, EngineUnavailable
from penstock.server.ipc.step_frames import select_outputs
from penstock.server.tenants import PriorityCeilings, engine_request_id

_POLL_INTERVAL_S: Final = 0.05
"""Interval between two checks for an engine that has the request, in seconds."""
_TOKENS_PER_ITERATION: Final = 256
"""Tokens of a history that are applied per iteration of the event loop; they take about a
millisecond."""

ReadGeneration = Callable[[bytes, str, str, PriorityCeilings], GenerationSpec]
"""Parses a serialised request; the other arguments are its id, its tenant and the tenant's maximum
priorities. Raises RequestError if the request is invalid."""


class Attachments:
    """Attaches streams that the engine keeps for Resume to one front. `read` parses the original
    request of a stream."""

    def __init__(self, front: Front, read: ReadGeneration) -> None:
        self._front = front
        self._read = read
        self._tasks: set[asyncio.Task[LiveRequest]] = set()

    async def attach(self, request_id: str, tenant: str, ceilings: PriorityCeilings) -> LiveRequest:
        """Return a tenant's request with its complete stream. The caller must pass it to
        `Front.release`.

        Waits at most `FrontConfig.max_replay_wait_s` for an engine that has the request.

        Raises RequestError: REQUEST_NOT_FOUND; SEQUENCE_UNAVAILABLE if its events were dropped;
        DRAINING if this front drains; ENGINE_DOWN if no engine has the request in time; QUEUE_FULL
        if this front is full; the error of parsing or tokenising the original request; or the error
        with which its stream ended meanwhile, such as STREAM_SUPERSEDED.
        """
        front = self._front
        due_s = front.clock() + front.config.max_replay_wait_s
        while True:
            port = await self._port(request_id, tenant, due_s)
            match await self._call(port, request_id, tenant, ceilings):
                case asyncio.Task() as starting:
                    return await self._started(starting)
                case RequestError() as error:
                    raise error
                case Attached(failure=AttachFailure.NOT_FOUND):
                    raise request_error(ErrorReason.REQUEST_NOT_FOUND)
                case Attached(failure=AttachFailure.LOST):
                    raise sequence_unavailable()
                case _ if front.clock() >= due_s:
                    raise request_error(
                        ErrorReason.ENGINE_DOWN,
                        "not settled after an engine restart; try again",
                    )
                case _:
                    await asyncio.sleep(_POLL_INTERVAL_S)

    async def _call(
        self, port: EnginePort, request_id: str, tenant: str, ceilings: PriorityCeilings
    ) -> "asyncio.Task[LiveRequest] | RequestError | Attached | None":
        """Request the stream from the engine, and start the request if the engine has it.

        Returns the task that starts the request; the error if it cannot start here; the engine's
        response if the engine has no stream; or None if the engine was lost. If the caller is
        cancelled, a stream that the engine attaches meanwhile is detached again.
        """
        answers: list[asyncio.Task[LiveRequest] | RequestError | Attached] = []
        is_abandoned = False

        def detach_all() -> None:
            for answer in answers:
                if isinstance(answer, asyncio.Task):
                    answer.add_done_callback(self._detach)

        def on_attached(answer: Attached) -> None:
            answers.append(self._on_attached(answer, tenant, ceilings, port))
            if is_abandoned:
                detach_all()

        try:
            with contextlib.suppress(EngineUnavailable):
                await port.attach_stream(engine_request_id(tenant, request_id), on_attached)
        except asyncio.CancelledError:
            is_abandoned = True
            detach_all()
            raise
        return answers[0] if answers else None

    async def _started(self, starting: "asyncio.Task[LiveRequest]") -> LiveRequest:
        """Return the started request. If the caller is cancelled first, detach the request."""
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._detach)
            raise

    def _detach(self, task: "asyncio.Task[LiveRequest]") -> None:
        """Detach the request, because its caller has disconnected."""
        if not task.cancelled() and task.exception() is None:
            self._front.release(task.result())

    async def _port(self, request_id: str, tenant: str, due_s: float) -> EnginePort:
        """Wait for an engine and return its port. If this front has the request, wait until that
        engine has it too.

        Raises RequestError if the request is not resumable, if this front drains, or if there is no
        such engine by `due_s`. If replays are off, does not wait.
        """
        front = self._front
        while True:
            port = front.port
            here = front.table.get(request_id, tenant)
            if here is not None and here.generation.resumption is None:
                raise request_error(ErrorReason.REQUEST_NOT_FOUND)
            is_ready = here is None or here.is_at_engine
            if here is not None and here.stream.is_closed:
                # If a stream exists, the engine has it. A stream that is being attached here is not
                # complete.
                is_ready = here not in front.attaching
            if port is not None and front.is_engine_up and is_ready:
                front.current_limits()
                return port
            if front.is_draining or not front.replays.is_enabled or front.clock() >= due_s:
                front.current_limits()
                raise request_error(ErrorReason.ENGINE_DOWN)
            if port is not None and not front.is_engine_up:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_INTERVAL_S):
                        await port.wait_up()
            else:
                await asyncio.sleep(_POLL_INTERVAL_S)
            await asyncio.sleep(0)

    def _on_attached(
        self, answer: Attached, tenant: str, ceilings: PriorityCeilings, port: EnginePort
    ) -> "asyncio.Task[LiveRequest] | RequestError | Attached":
        """Register the attached request, so that its later events are routed to this front.

        Returns the task that starts it; `answer` if the engine has no stream; or the error if it
        cannot start here.
        """
        front, resume_spec = self._front, answer.resume_spec
        if resume_spec is None:
            return answer
        name = engine_request_id(tenant, resume_spec.request_id)
        front.on_detached(name, answer.keys)
        try:
            generation = self._read(resume_spec.message, resume_spec.request_id, tenant, ceilings)
            request = LiveRequest(resume_spec.request_id, generation, resume_spec.arrival_s)
            front.table.add(request)
        except RequestError as error:
            port.detach((name,))
            return error
        events = deque(frame.value() for frame in answer.history)
        attachment = Attachment(resume_spec, answer.keys, events, front.hello)
        front.attaching[request] = attachment
        starting = asyncio.create_task(self._start(request, attachment), name="attach")
        self._tasks.add(starting)
        starting.add_done_callback(self._tasks.discard)
        return starting

    async def _start(self, request: LiveRequest, attachment: Attachment) -> LiveRequest:
        """Tokenise the prompt of the attached request, create its outputs and apply its history.

        Returns the request. Raises RequestError if the prompt is rejected, if no engine is
        connected and replays are off, or if the request has failed meanwhile, for example because
        another front has attached it.
        """
        front, resume_spec, generation = self._front, attachment.resume_spec, request.generation
        try:
            limits = front.known_limits()
            prompt, prompt_text = await front.prompts.tokenize(generation, limits, is_replay=True)
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
            await self._catch_up(request, attachment)
        except BaseException:
            front.release(request)
            front.attaching.pop(request, None)
            raise
        front.finish_attach(request, attachment.hello is front.hello and front.is_engine_up)
        return request

    async def _catch_up(self, request: LiveRequest, attachment: Attachment) -> None:
        """Apply the history and the events that arrive meanwhile, with pauses for the event loop.

        Raises RequestError if the request has failed meanwhile, see `_raise_if_over`.
        """
        request.is_backlog_unlimited = True
        keys = set(attachment.keys)
        num_tokens = 0
        while attachment.events:
            events = attachment.events.popleft()
            rows = np.flatnonzero(np.isin(events.keys, attachment.keys))
            for part in _parts_of(select_outputs(events, keys.__contains__, rows)):
                self._front.apply_history(request, part)
                num_tokens += 1 + len(part.tokens)  # Other events take about as long as a token.
                if num_tokens >= _TOKENS_PER_ITERATION:
                    num_tokens = 0
                    await asyncio.sleep(0)
                    _raise_if_over(request)


def _parts_of(events: StepEvents) -> Iterator[StepEvents]:
    """Yield the events in parts of at most `_TOKENS_PER_ITERATION` tokens."""
    logprobs = events.logprobs
    while len(events.tokens) > _TOKENS_PER_ITERATION:
        now, later = slice(_TOKENS_PER_ITERATION), slice(_TOKENS_PER_ITERATION, None)
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
    """Raise the error of the request if it has failed, for example because another front has
    attached it."""
    if request.stream.failure is not None:
        raise RequestError(request.stream.failure)


@dataclass(slots=True, eq=False)
class ClientPosition:
    """The position of a client in a stream, from which the stream continues.

    `is_accepted` and `is_echoed` are True if the client has received the acceptance and the
    complete prompt. `tokens` has the number of tokens of each output, by output index, that the
    client has received and that `remaining_events` has not skipped yet. `begun` has the index of
    each output of which the client has received tokens, until more of that output is sent. If such
    an output has ended with STOP or LENGTH, its last text (a `TokensPiece` without tokens) is
    skipped too, because the client received it together with the last token.
    """

    is_accepted: bool = False
    is_echoed: bool = False
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    begun: set[int] = field(default_factory=set[int])

    def remaining_events(
        self, batch: Iterable[StreamEvent], request: LiveRequest
    ) -> list[StreamEvent]:
        """Return the events of `batch` that the client has not received. A `TokensPiece` in `batch`
        must have at most one token.

        Raises RequestError (SEQUENCE_UNAVAILABLE) if the stream has finished and an output has
        fewer tokens than the client claims to have received.
        """
        return [event for event in batch if self._is_new(event, request)]

    def _is_new(self, event: StreamEvent, request: LiveRequest) -> bool:
        match event:
            case Accepted():
                return not self.is_accepted
            case PromptPiece():
                return not self.is_echoed
            case TokensPiece() if (num_left := self.tokens.get(event.output_index, 0)) > 0:
                self.tokens[event.output_index] = num_left - event.num_tokens
                return False
            case TokensPiece() if event.output_index in self.begun:
                if not event.num_tokens and _ended_by_itself(request, event.output_index):
                    return False
                self.begun.discard(event.output_index)
                return True
            case Finished() if any(num_left > 0 for num_left in self.tokens.values()):
                raise sequence_unavailable()
            case _:
                return True


def client_position(
    generation: GenerationSpec, next_sequence: int, num_tokens: Sequence[int]
) -> ClientPosition:
    """Return the position of a client that expects the message with number `next_sequence`.
    `num_tokens` has the number of tokens that it has received of each output, by output index.

    Raises RequestError (SEQUENCE_UNAVAILABLE) for an inconsistent position: more outputs or tokens
    than possible, or a position inside the prompt.
    """
    most = generation.stopping.max_tokens
    fits = len(num_tokens) <= generation.sampling.num_outputs
    fits = fits and (most is None or max(num_tokens, default=0) <= most)
    output = generation.output
    if (output.echo or output.num_prompt_logprobs >= 0) and not any(num_tokens):
        fits = fits and next_sequence <= 1
    if not fits:
        raise sequence_unavailable()
    counts = dict(enumerate(num_tokens))
    begun = {index for index, count in counts.items() if count}
    return ClientPosition(next_sequence > 0, next_sequence > 0 and bool(begun), counts, begun)


def sequence_unavailable() -> RequestError:
    """Return the error for a position from which a stream cannot continue, or for a stream that is
    no longer kept."""
    return request_error(ErrorReason.SEQUENCE_UNAVAILABLE, first_sequence="0", next_sequence="0")


def _ended_by_itself(request: LiveRequest, index: int) -> bool:
    """Return True if an output ended with STOP or LENGTH."""
    end = request.outputs[index].end
    return end is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH)
