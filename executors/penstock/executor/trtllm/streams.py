"""Submits requests to the engine, reads their responses and aborts them, on the event loop.

Each request has its own task. The new tokens of a response are the output ids that were not sent
before. An exception while a response is read fails only that request, unless the engine is no
longer healthy. An aborted request may never get a final response, so the wait for it is limited.
All code runs on the event loop on which the engine is used.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.executor.trtllm.api import CompletionOutput, Llm, Logprob, RequestOutput
from penstock.executor.trtllm.error_texts import is_fatal, is_invalid_constraint, is_invalid_request
from penstock.executor.trtllm.request_mapping import NotResumable
from penstock.executor.trtllm.response_queue import Response, ResponseQueue
from penstock.executor.trtllm.submitted_request import SubmittedRequest
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import Constraint

logger = logging.getLogger(__name__)

MakeArguments = Callable[[SubmittedRequest], dict[str, Any]]
ConstraintFault = Callable[[Constraint, str], Awaitable[str]]
"""Called with a constraint and its tenant; returns why the constraint must not be submitted, or an
empty string.
"""


def is_healthy(llm: Llm) -> bool:
    """Return the result of the engine's own health check, for which there is no public method."""
    return llm._check_health()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


@dataclass(slots=True, eq=False)
class _OutputStream:
    """A request that was handed to this module and has not ended. `result`: None while its
    constraint is checked, before it is submitted.
    """

    submitted: SubmittedRequest
    result: RequestOutput | None = None
    task: "asyncio.Task[None] | None" = None
    is_aborted: bool = False
    has_responded: bool = False
    abort_timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """Abort the request in the engine, if it was submitted and has not finished; later calls do
        nothing.
        """
        if not self.is_aborted and self.result is not None and not self.result.finished:
            self.result.abort()
        self.is_aborted = True


@dataclass(slots=True, eq=False)
class Streams:
    """The requests that were submitted to one engine, or whose constraint is being checked, and
    have not ended.

    `make_arguments` returns the arguments of `generate_async`, or raises ValueError.
    `constraint_fault` returns why a constraint must not be submitted; None: no check.
    `request_error`: the engine's exception class for a failed request. `abort_timeout_s`: how long
    to wait for the last response of an aborted request, seconds. `on_submit` is called after each
    submission. `num_unconfirmed_aborts`: number of aborted requests whose last response did not
    arrive in that time.
    """

    llm: Llm
    loop: asyncio.AbstractEventLoop
    responses: ResponseQueue
    make_arguments: MakeArguments
    request_error: type[Exception]
    abort_timeout_s: float
    on_submit: Callable[[], None]
    constraint_fault: ConstraintFault | None = None
    num_unconfirmed_aborts: int = 0
    _streams: dict[SubmittedRequest, _OutputStream] = field(
        default_factory=dict["SubmittedRequest", "_OutputStream"]
    )

    def __len__(self) -> int:
        return len(self._streams)

    def abort_and_submit(
        self, aborts: Sequence[SubmittedRequest], submits: Sequence[SubmittedRequest]
    ) -> None:
        """Abort and then submit requests; aborts come first, since they free resources. An
        unexpected exception is recorded as the end of the engine.
        """
        try:
            for submitted in aborts:
                self._abort(submitted)
            for submitted in submits:
                self._submit(submitted)
        except Exception as error:
            self.responses.fail(error)

    async def close(self) -> None:
        """Abort all remaining requests, and wait until the tasks that read their responses have
        ended.
        """
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()
            stream.abort()
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _submit(self, submitted: SubmittedRequest) -> None:
        try:
            arguments = self.make_arguments(submitted)
        except ValueError as error:
            is_good = isinstance(error, NotResumable)
            self._put(_rejected(submitted, str(error), is_rejected=not is_good))
            return
        stream = _OutputStream(submitted)
        if submitted.spec.constraint is not None and self.constraint_fault is not None:
            checking = self.constraint_fault
            running = self._check_and_submit(stream, arguments, checking)
        else:
            rejected = self._send_to_engine(stream, arguments)
            if rejected is not None:
                self._put(rejected)
                return
            running = self._read_until_end(stream)
        self._streams[submitted] = stream
        stream.task = self.loop.create_task(running)

    def _send_to_engine(self, stream: _OutputStream, arguments: dict[str, Any]) -> Response | None:
        """Submit a request to the engine; return None if the engine accepts it, else the final
        response to report for it.

        Raises ExecutorDied if the error text reports an unusable engine. Catches only
        `request_error`, ValueError and TypeError.
        """
        try:
            stream.result = self.llm.generate_async(**arguments)
        except (self.request_error, ValueError, TypeError) as error:
            # A TypeError is more likely a bug here than an error of the request.
            text, quoted = str(error), _quotable(stream)
            if is_fatal(text, quoted):
                raise ExecutorDied(f"the engine is lost: {_first_line(text)}") from error
            is_clients = not isinstance(error, TypeError) and is_invalid_request(text, quoted)
            return _rejected(stream.submitted, text, is_rejected=is_clients)
        self.on_submit()
        return None

    def _abort(self, submitted: SubmittedRequest) -> None:
        stream = self._streams.get(submitted)
        if stream is None or stream.is_aborted:
            return
        stream.abort()
        if stream.result is None:
            # Its constraint is being checked or waits to be checked; the request will not be
            # submitted.
            if stream.task is not None:
                stream.task.cancel()
        else:
            stream.abort_timer = self.loop.call_later(
                self.abort_timeout_s, self._on_abort_timeout, stream
            )

    def _on_abort_timeout(self, stream: _OutputStream) -> None:
        # The request was most likely in the engine's queue, where an abort gets no response.
        self.num_unconfirmed_aborts += 1
        if stream.task is not None:
            stream.task.cancel()

    async def _check_and_submit(
        self, stream: _OutputStream, arguments: dict[str, Any], fault_of: ConstraintFault
    ) -> None:
        """Check the constraint; if it passes, submit the request and read its responses, else
        report the failure.
        """
        submitted = stream.submitted
        assert submitted.spec.constraint is not None
        last: Response | None = _rejected(
            submitted, "aborted before it was submitted", is_rejected=False
        )
        try:
            fault = await fault_of(submitted.spec.constraint, submitted.spec.tenant)
            if fault:
                last = _rejected(submitted, fault, is_rejected=True, is_constraint_error=True)
            elif not stream.is_aborted:
                last = self._send_to_engine(stream, arguments)
        except asyncio.CancelledError:
            logger.debug("aborted while a constraint was checked")
        except Exception as error:
            self.responses.fail(error)
        if last is None:
            await self._read_until_end(stream)
        else:
            del self._streams[submitted]
            self._put(last)

    async def _read_until_end(self, stream: _OutputStream) -> None:
        submitted = stream.submitted
        last = Response(submitted, is_last=True, failure="the engine ended it without a result")
        try:
            last = await self._read(stream)
        except asyncio.CancelledError:
            last = Response(submitted, is_last=True, failure="given up", is_synthetic=True)
        except self.request_error as error:
            last = self._failed(stream, str(error))
        except Exception as error:
            last = Response(submitted, is_last=True, failure=f"raised {type(error).__name__}")
            if self._is_alive_after(error):
                stream.abort()
            else:
                self.responses.fail(error)
        finally:
            if stream.abort_timer is not None:
                stream.abort_timer.cancel()
            del self._streams[submitted]
            self._put(last)

    def _failed(self, stream: _OutputStream, text: str) -> Response:
        """Return the final response of a request for which the engine raised an error with this
        text; if the error is fatal, also record the end of the engine.
        """
        quoted = _quotable(stream)
        if is_fatal(text, quoted):
            self.responses.fail(ExecutorDied(f"the engine is lost: {_first_line(text)}"))
        # If the engine has responded before, it has accepted the request.
        is_early = not stream.has_responded
        return Response(
            stream.submitted,
            is_last=True,
            failure=text,
            is_rejected=is_early and is_invalid_request(text, quoted),
            is_constraint_error=is_early and is_invalid_constraint(text, quoted),
        )

    def _is_alive_after(self, error: Exception) -> bool:
        """Return whether the engine still works after `error` was raised while a response was read;
        log the error.

        The exception alone does not show it: a failed assertion about one result is raised in the
        same way as an error that ends the engine.
        """
        try:
            is_alive = is_healthy(self.llm) and not is_fatal(str(error))
        except Exception:
            is_alive = False
        logger.warning("a result of the engine raised; healthy: %s", is_alive, exc_info=error)
        return is_alive

    async def _read(self, stream: _OutputStream) -> Response:
        """Queue the responses of a request until it ends; return the last response without queuing
        it. After an abort, all responses but the last are dropped.
        """
        submitted = stream.submitted
        wants_logprobs = submitted.num_logprobs >= 0
        num_sent = 0
        assert stream.result is not None
        async for output in stream.result:
            sequence = output.outputs[0]
            # The last item may have fewer ids than were sent: the engine removes a stop token.
            response = Response(submitted, sequence.token_ids[num_sent:])
            if wants_logprobs:
                response.logprobs = _new_logprobs(sequence, num_sent, response.tokens)
            if not stream.has_responded:
                response.num_cached = output.cached_tokens
                stream.has_responded = True
            if output.finished:
                response.is_last = True
                response.finish_reason = sequence.finish_reason or ""
                response.stop_id = _stop_id(sequence, submitted)
                return response
            num_sent += len(response.tokens)
            if not stream.is_aborted:
                self._put(response)
        return Response(submitted, is_last=True, failure="the engine ended it without a result")

    def _put(self, response: Response) -> None:
        self.responses.put(response, self.loop)


def _rejected(
    submitted: SubmittedRequest,
    failure: str,
    *,
    is_rejected: bool,
    is_constraint_error: bool = False,
) -> Response:
    """Return the only response of a request that was not submitted or that the engine rejected at
    submission.
    """
    return Response(
        submitted,
        is_last=True,
        failure=failure,
        is_rejected=is_rejected,
        is_constraint_error=is_constraint_error,
        is_synthetic=True,
    )


def _quotable(stream: _OutputStream) -> str:
    """Return the client's text that an engine error may quote: the texts of the constraint, or ""
    without one.
    """
    constraint = stream.submitted.spec.constraint
    return "" if constraint is None else "\n".join(constraint.texts)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


@dataclass(frozen=True, slots=True)
class _ChosenLogprob:
    """The log probability of the chosen token only, for engines that return plain numbers. Rank 0:
    unknown.
    """

    logprob: float
    rank: int | None = 0


def _new_logprobs(
    sequence: CompletionOutput, start: int, tokens: Sequence[int]
) -> Sequence[Mapping[int, Logprob]]:
    """Return the log probabilities of `tokens`; fewer entries if the engine has not returned all.
    `start`: index of the first of `tokens` in the sequence.
    """
    found: Sequence[Mapping[int, Logprob] | float] = sequence.logprobs or ()
    return [
        entry if isinstance(entry, Mapping) else {token: _ChosenLogprob(entry)}
        for token, entry in zip(tokens, found[start : start + len(tokens)], strict=False)
    ]


def _stop_id(sequence: CompletionOutput, submitted: SubmittedRequest) -> int:
    if sequence.finish_reason != "stop":
        return -1
    if isinstance(sequence.stop_reason, int):
        return sequence.stop_reason
    # The engine reports no stop_reason for its end_id, our last stop id (see request_mapping).
    return submitted.spec.stop_ids[-1] if submitted.spec.stop_ids else -1
