"""The loop's side: submits to the engine, follows every request, aborts.

Owns the tasks, one per request inside the engine, and the rules of a foreign API that fails in its
own ways: deltas are cut from cumulative ids; an exception out of an iteration is its last word; an
aborted request may never answer, so nobody waits for that longer than a grace. Everything here runs
on the one event loop that also built the engine.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.executor.trtllm.api import CompletionOutput, Llm, Logprob, RequestOutput
from penstock.executor.trtllm.refusals import is_refusal
from penstock.executor.trtllm.request_mapping import NotResumable
from penstock.executor.trtllm.response_queue import Response, ResponseQueue
from penstock.executor.trtllm.submitted_request import SubmittedRequest

log = logging.getLogger(__name__)

MakeArguments = Callable[[SubmittedRequest], dict[str, Any]]


@dataclass(slots=True, eq=False)
class _Stream:
    """A request inside the engine."""

    submitted: SubmittedRequest
    result: RequestOutput
    task: "asyncio.Task[None] | None" = None
    is_aborted: bool = False
    has_spoken: bool = False
    grace: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Streams:
    """Requests inside one engine. `make_arguments` gives what `generate_async` takes, or raises
    ValueError; `request_error` is the engine's exception for a single request. `abort_grace_s`: how
    long an aborted request may stay silent. `num_given_up` counts those that did.
    """

    llm: Llm
    loop: asyncio.AbstractEventLoop
    responses: ResponseQueue
    make_arguments: MakeArguments
    request_error: type[Exception]
    abort_grace_s: float
    on_submit: Callable[[], None]
    num_given_up: int = 0
    _streams: dict[SubmittedRequest, _Stream] = field(
        default_factory=dict["SubmittedRequest", "_Stream"]
    )

    def __len__(self) -> int:
        return len(self._streams)

    def carry_out(
        self, aborts: Sequence[SubmittedRequest], submits: Sequence[SubmittedRequest]
    ) -> None:
        """One step's commands: aborts first, they make room."""
        try:
            for submitted in aborts:
                self._abort(submitted)
            for submitted in submits:
                self._submit(submitted)
        except Exception as error:
            self.responses.die(error)

    async def close(self) -> None:
        """Abort whatever is left and leave it."""
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()
            if not (stream.is_aborted or stream.result.finished):
                stream.is_aborted = True
                stream.result.abort()
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _submit(self, submitted: SubmittedRequest) -> None:
        try:
            arguments = self.make_arguments(submitted)
        except ValueError as error:
            is_good = isinstance(error, NotResumable)
            self._put_own(submitted, failure=str(error), is_refusal=not is_good)
            return
        try:
            result = self.llm.generate_async(**arguments)
        except (self.request_error, ValueError, TypeError) as error:
            # What it will not take for this request; a TypeError is rather our fault than anyone's.
            text = str(error)
            is_ours = isinstance(error, TypeError)
            self._put_own(submitted, failure=text, is_refusal=not is_ours and is_refusal(text))
            return
        # Any other exception is the engine's: `carry_out` passes it on.
        stream = _Stream(submitted, result)
        self._streams[submitted] = stream
        stream.task = self.loop.create_task(self._follow(stream))
        self.on_submit()

    def _abort(self, submitted: SubmittedRequest) -> None:
        stream = self._streams.get(submitted)
        if stream is None or stream.is_aborted:
            return
        stream.is_aborted = True
        if not stream.result.finished:
            stream.result.abort()
        stream.grace = self.loop.call_later(self.abort_grace_s, self._give_up, stream)

    def _give_up(self, stream: _Stream) -> None:
        # It waited in the engine's own queue, most likely: such an abort is never answered.
        self.num_given_up += 1
        if stream.task is not None:
            stream.task.cancel()

    async def _follow(self, stream: _Stream) -> None:
        submitted = stream.submitted
        last = Response(submitted, is_last=True, failure="the engine ended it without a word")
        try:
            last = await self._read(stream)
        except asyncio.CancelledError:
            last = Response(submitted, is_last=True, failure="given up", is_own=True)
        except self.request_error as error:
            text = str(error)
            # Once it has spoken, the engine had nothing against the request.
            is_clients = not stream.has_spoken and is_refusal(text)
            last = Response(submitted, is_last=True, failure=text, is_refusal=is_clients)
        except Exception as error:
            log.debug("the engine died under a request", exc_info=True)
            self.responses.die(error)
        finally:
            if stream.grace is not None:
                stream.grace.cancel()
            del self._streams[submitted]
            self._put(last)

    async def _read(self, stream: _Stream) -> Response:
        """Pass tokens on until the end; the last response."""
        submitted = stream.submitted
        wants_logprobs = submitted.num_logprobs >= 0
        num_sent = 0
        async for output in stream.result:
            sequence = output.outputs[0]
            # The last item may hold fewer ids than were sent: a stop that was cut off again.
            response = Response(submitted, sequence.token_ids[num_sent:])
            if wants_logprobs:
                response.logprobs = _cut(sequence, num_sent, response.tokens)
            if not stream.has_spoken:
                response.num_cached = output.cached_tokens
                stream.has_spoken = True
            if output.finished:
                response.is_last = True
                response.finish_reason = sequence.finish_reason or ""
                response.stop_id = _stop_id(sequence, submitted)
                return response
            num_sent += len(response.tokens)
            if not stream.is_aborted:
                self._put(response)
        return Response(submitted, is_last=True, failure="the engine ended it without a word")

    def _put_own(self, submitted: SubmittedRequest, *, failure: str, is_refusal: bool) -> None:
        """It never went in."""
        self._put(
            Response(submitted, is_last=True, failure=failure, is_refusal=is_refusal, is_own=True)
        )

    def _put(self, response: Response) -> None:
        self.responses.put(response, self.loop)


@dataclass(frozen=True, slots=True)
class _ChosenLogprob:
    """Where the engine tells plain numbers, of the chosen token alone."""

    logprob: float
    rank: int | None = None


def _cut(
    sequence: CompletionOutput, start: int, tokens: Sequence[int]
) -> Sequence[Mapping[int, Logprob]] | None:
    """The log probabilities of `tokens`, which begin at `start`."""
    if sequence.logprobs is None:
        return None
    told: Sequence[Mapping[int, Logprob] | float] = sequence.logprobs
    cut: list[Mapping[int, Logprob]] = []
    for token, entry in zip(tokens, told[start : start + len(tokens)], strict=False):
        if isinstance(entry, Mapping):
            cut.append(entry)
        else:
            cut.append({token: _ChosenLogprob(entry)})
    return cut


def _stop_id(sequence: CompletionOutput, submitted: SubmittedRequest) -> int:
    if sequence.finish_reason != "stop":
        return -1
    if isinstance(sequence.stop_reason, int):
        return sequence.stop_reason
    # The engine's end_id has no stop_reason, and is the last of ours (see request_mapping).
    return submitted.spec.stop_ids[-1] if submitted.spec.stop_ids else -1
