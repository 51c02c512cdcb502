"""Applies the engine's events of one request at a front (gRPC server process) to its stream.

Merges the outputs of the request into the stream, and computes its usage. Uses neither gRPC nor the
engine port. Never blocks. All methods must be called on the event loop; times are seconds on the
engine's clock.
"""

from collections.abc import Sequence
from typing import TypeAlias

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, PrefixFound, Queued
from penstock.scheduler.request import NO_TIME, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.front.errors import ENGINE_DOWN, Failure, failure_for
from penstock.server.front.events import (
    Accepted,
    Finished,
    LogprobRows,
    OutputEnd,
    Progress,
    Timings,
    TokenRecord,
    TokensPiece,
    Usage,
)
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.live_output import CapturedText, LiveOutput
from penstock.server.front.phases import DECODE, PREFILL, QUEUE, PhaseClock
from penstock.server.front.stream import TokenStream
from penstock.server.front.stream_head import StreamHead, accepted_event
from penstock.server.front.submission import Submission
from penstock.server.text.text_stream import TextStream

LiveRequestOutput: TypeAlias = "LiveOutput[LiveRequest]"

_REASON_NAMES = {reason: reason.name for reason in FinishReason}
_NORMAL_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class LiveRequest:
    """A request, from its opening until this front removes it.

    The key of an output is its number in the engine.

    Attributes:
        ends: The end of each output; empty until all outputs have ended.
        has_engine_end: True if the engine has reported the end of the first output.
        first_token_s: Time when the first token arrived in this process; NO_TIME before.
        is_cancelled: True if the request was cancelled and the engine must confirm it.
        num_replays: Number of resubmissions after the loss of an engine or of its connection.
        is_detached: True if no client reads the request. It stays here so that it can be submitted
            to another engine.
        is_backlog_unlimited: True if any number of tokens may be unread: while a client that
            resumes the stream reads its earlier events, and for GenerateOnce, which sends nothing
            before the end.
        is_at_engine: True if the request has been submitted and its engine is not lost.
        is_released: True after the front has removed the request.
    """

    __slots__ = (
        "_num_ended",
        "_submission",
        "_wants_records",
        "arrival_s",
        "ends",
        "first_token_s",
        "generation",
        "has_engine_end",
        "head",
        "is_at_engine",
        "is_backlog_unlimited",
        "is_cancelled",
        "is_detached",
        "is_released",
        "num_cached_tokens",
        "num_replays",
        "outputs",
        "phases",
        "request_id",
        "stream",
    )

    def __init__(self, request_id: str, generation: GenerationSpec, arrival_s: float) -> None:
        self.request_id = request_id
        self.generation = generation
        self.arrival_s = arrival_s
        self.stream = TokenStream(generation.output.chunks)
        self.head = StreamHead(self.stream)
        self.phases = PhaseClock(arrival_s)
        self.outputs: tuple[LiveRequestOutput, ...] = ()
        self.ends: tuple[OutputEnd, ...] = ()
        self.num_cached_tokens = 0
        self.first_token_s = NO_TIME
        self.has_engine_end = False
        self.is_at_engine = False
        self.is_cancelled = False
        self.is_backlog_unlimited = False
        self.is_detached = False
        self.is_released = False
        self.num_replays = 0
        self._submission: Submission | None = None
        self._num_ended = 0
        self._wants_records = generation.output.wants_records

    def start(
        self,
        submission: Submission,
        texts: Sequence[TextStream],
        *,
        model: str,
        prompt_text: str,
        now_s: float,
        has_content: bool = False,
    ) -> None:
        """Create the outputs, and prepare the acceptance and the prompt for the stream.

        The acceptance is the `Accepted` event. Call this before the first submission. `texts` has
        the text stream of each output. `prompt_text` is the prompt to echo, empty without echo. If
        `has_content`, the start of each output is captured for traces.
        """
        self._submission = submission
        self.phases.note_submitted(now_s)
        self.outputs = tuple(
            [
                LiveOutput(self, spec.output_index, spec.key, text, self.stream)
                for spec, text in zip(submission.specs, texts, strict=True)
            ]
        )
        if has_content:
            for output in self.outputs:
                output.captured = CapturedText()
        accepted, prompt = accepted_event(
            self.request_id,
            submission,
            self.generation.output,
            model=model,
            prompt_text=prompt_text,
        )
        self.head.prepare(accepted, prompt)

    @property
    def tenant(self) -> str:
        """The tenant of the request."""
        return self.generation.tenant

    @property
    def trace_id(self) -> bytes:
        """The trace id, 16 bytes; empty for a request without a trace."""
        return self.generation.trace_id

    @property
    def live_keys(self) -> tuple[int, ...]:
        """Keys of the outputs that have not ended, according to the events received so far."""
        return tuple([output.key for output in self.outputs if output.is_live])

    @property
    def num_queued(self) -> int:
        """Number of outputs that wait for a slot in the batch, according to the events received so
        far."""
        return sum([output.is_live and not output.is_running for output in self.outputs])

    @property
    def state(self) -> RequestState:
        """The state of the request; COMPLETED or ERROR once the stream is closed."""
        if not self.stream.is_closed:
            return self.phases.state
        return RequestState.COMPLETED if self.stream.failure is None else RequestState.ERROR

    def is_unread_since(self, since_s: float) -> bool:
        """Return True if the stream ended before `since_s` and is still unread. Always False if
        `is_backlog_unlimited`.

        Call this only for a request in the table: once its stream is read to the end, a request is
        removed from there.
        """
        is_over = self.stream.is_closed and not self.is_backlog_unlimited
        return is_over and self.phases.segments[-1].start_s < since_s

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Finish reasons of the outputs that have ended."""
        ends = self.ends or [output.end for output in self.outputs if output.end is not None]
        return tuple([_REASON_NAMES[end.reason] for end in ends])

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens; 0 before `start`."""
        return self._submission.specs[0].num_prompt_tokens if self._submission else 0

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, over all outputs."""
        return sum([output.text.num_tokens for output in self.outputs])

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far, over all outputs."""
        return sum([output.num_preemptions for output in self.outputs])

    @property
    def specs(self) -> tuple[RequestSpec, ...]:
        """The specs of `submission`, one per output; empty before `start`."""
        return self._submission.specs if self._submission else ()

    @property
    def submission(self) -> Submission | None:
        """The first submission, but with the keys of the latest one; None before `start`."""
        return self._submission

    def on_queued(self, output: LiveRequestOutput, change: Queued) -> None:
        """Handle `Queued`: store the queue position of the first output, and send the acceptance
        unless it was sent."""
        if output.index == 0:
            self.head.note_queued(change, is_waiting=self.phases.phase is QUEUE)
        self.head.accept()

    def report_queue_position(self) -> None:
        """Send the queue position if it is due. Call this after all events of a step."""
        self.head.report_queue_position(self.state, self.phases.spent_s(QUEUE))

    def on_admitted(self, output: LiveRequestOutput, change: Admitted) -> None:
        """Handle `Admitted`: an output got a slot in the batch, for the first time or again."""
        self.head.accept()
        # After a replay the cache may contain output tokens of this request, which must not be
        # counted as cached prompt tokens.
        if output.index == 0 and change.num_preemptions == 0 and self.first_token_s == NO_TIME:
            self.num_cached_tokens = change.num_cached_tokens
        output.is_running = True
        num_cached = change.num_cached_tokens
        wait = change.wait if output.index == 0 else None
        if self.phases.note_admitted(change.at_s, num_cached_tokens=num_cached, wait=wait):
            self._change_state(num_cached)

    def on_preempted(self, output: LiveRequestOutput, change: Preempted) -> None:
        """Handle `Preempted`: an output lost its slot and waits in the queue."""
        output.num_preemptions += 1
        output.is_running = False
        if output.index == 0:
            self.phases.add_details(residency=change.residency)
        if self.phases.note_stopped(change.at_s, has_more=True, num_tokens=self.num_output_tokens):
            self._change_state(0)

    def on_prefix_found(self, output: LiveRequestOutput, change: PrefixFound) -> None:
        """Record the number of cached prompt tokens that the executor reports. Before the first
        token and a preemption it also replaces the predicted number. Ignored for outputs other than
        the first."""
        if output.index == 0 and output.num_preemptions == 0 and self.first_token_s == NO_TIME:
            self.num_cached_tokens = change.num_cached_tokens
        if output.index == 0:
            self.phases.note_prefix(change.num_cached_tokens)

    def on_prompt_logprobs(self, first_position: int, logprobs: TokenLogprobs) -> None:
        """Push the prompt tokens from `first_position` on, with log probabilities. Tokens that were
        pushed before are skipped."""
        self.head.accept()
        for piece in self.head.prompt.rows(first_position, logprobs):
            self.stream.push(piece)

    def on_token(
        self,
        output: LiveRequestOutput,
        token_id: int,
        *,
        at_s: float,
        now_s: float,
        rows: LogprobRows,
        row: int,
    ) -> bool:
        """Push one new token to the stream. Its log probabilities are in row `row` of `rows`.

        Ignored if the output has ended. While a replayed output repeats earlier tokens, the token
        is only compared with the earlier one, and the request fails if they differ. `at_s` is the
        time when the engine received the token, and `now_s` is the time of its arrival in this
        process. Returns True if a stop string has ended the output; the caller must then notify the
        engine.
        """
        if not output.is_live:
            return False
        if output.num_repeating:
            self._check_repeated(output, token_id, at_s=at_s, now_s=now_s)
            return False
        output.token_ids.append(token_id)
        # This runs for every token that is not plain text, so conditions that are rarely true are
        # checked before the call.
        if self.head.is_due:
            self.head.accept()
        if self.phases.phase is not DECODE:
            self.phases.note_token(at_s)
        if self.first_token_s == NO_TIME:
            self.first_token_s = now_s
        records: Sequence[TokenRecord] = ()
        if self._wants_records:
            records = (rows.record(row, token_id, self.generation.output.num_logprobs),)
        elif output.text.is_plain and output.index == 0 and output.captured is None:
            # The next tokens need nothing else until the state changes.
            output.is_plain = True
            self.stream.push_text(output.text.push_one(token_id))
            return False
        delta = output.text.push((token_id,))
        self.stream.push_tokens(TokensPiece(output.index, delta.text, delta.num_tokens, records))
        if output.captured is not None:
            output.captured.add(delta.text)
        if delta.stop is None:
            return False
        self._end_output(output, FinishReason.STOP, at_s=at_s, now_s=now_s, stop_string=delta.stop)
        return True

    def on_completed(self, output: LiveRequestOutput, end: Completed, now_s: float) -> None:
        """Deliver the remaining text of an output, and its end.

        If a replayed output ends with STOP or LENGTH before it has repeated its earlier tokens,
        fails the request instead.
        """
        self._note_engine_end(output, end)
        if not output.is_live:
            return
        if output.num_repeating and end.reason in _NORMAL_ENDS:
            # The output ended earlier than before the replay, so it is a different output.
            self.fail(ENGINE_DOWN, now_s)
            return
        self.head.accept()
        delta = output.text.finish()
        if delta.text:
            self.stream.push(TokensPiece(output.index, delta.text, delta.num_tokens, ()))
            if output.captured is not None:
                output.captured.add(delta.text)
        reason = FinishReason.STOP if delta.stop is not None else end.reason
        # The end-of-sequence token of the model is the normal end, and is not reported.
        is_requested = end.stop_id in self.generation.stopping.stop_token_ids
        self._end_output(
            output,
            reason,
            at_s=end.at_s,
            now_s=now_s,
            stop_string=delta.stop,
            stop_token_id=end.stop_id if is_requested and delta.stop is None else None,
        )

    def on_failed(self, output: LiveRequestOutput, end: Failed) -> None:
        """Fail the request with all its outputs, because the engine rejected or failed one of
        them."""
        self._note_engine_end(output, end)
        if not output.is_live:
            return
        output.is_live = output.is_plain = False
        submission = self._submission
        self.fail(
            failure_for(
                end,
                self.generation,
                phases=self.phases,
                deadline_kind=submission.deadline_kind if submission else "server",
                tenant=self.tenant,
            ),
            end.at_s,
        )

    def fail(self, failure: Failure, now_s: float) -> None:
        """End the request with an error, unless it has ended, and wake the writer."""
        self.phases.stop(now_s)
        self.stream.fail(failure)
        self.stream.wake()

    def suspend(self, now_s: float) -> None:
        """Make the request wait for another engine to continue its outputs. Also sends the
        acceptance, unless it was already sent."""
        self.head.accept()
        self.is_at_engine = False
        for output in self.outputs:
            output.is_plain = output.is_running = False
        if self.phases.note_engine_lost(now_s, num_tokens=self.num_output_tokens):
            self._change_state(0)
        self.stream.wake()

    def resubmit(self, submission: Submission, now_s: float) -> None:
        """Record that the request was submitted again. `submission` is the first submission with
        the current keys."""
        self._submission = submission
        self.num_replays += 1
        self.phases.note_resubmitted(now_s)

    def cancel_unsubmitted(self, model: str, now_s: float) -> None:
        """End a request that was cancelled before submission, with the events of a cancelled
        request."""
        self.phases.stop(now_s)
        self.ends = tuple(
            OutputEnd(output_index=index, reason=FinishReason.CANCELLED, num_completion_tokens=0)
            for index in range(self.generation.sampling.num_outputs)
        )
        seed = self.generation.sampling.seed or 0
        self.stream.push(
            Accepted(
                request_id=self.request_id,
                model=model,
                num_prompt_tokens=0,
                seed=seed,
                trace_id=self.trace_id.hex(),
            )
        )
        self._finish(now_s)
        self.stream.wake()

    def _check_repeated(
        self, output: LiveRequestOutput, token_id: int, *, at_s: float, now_s: float
    ) -> None:
        self.phases.note_token(at_s)
        if not output.repeats(token_id):
            # The continuation would not match the delivered tokens.
            self.fail(ENGINE_DOWN, now_s)

    def _change_state(self, num_cached_tokens: int) -> None:
        """Send the new state of the request: it has started to run, or it waits again."""
        for output in self.outputs:
            output.is_plain = False
        self.stream.push(
            Progress(
                state=self.phases.state,
                num_cached_prompt_tokens=num_cached_tokens,
                num_preemptions=self.num_preemptions,
                queue_s=self.phases.spent_s(QUEUE),
            )
        )

    def _note_engine_end(self, output: LiveRequestOutput, end: Completed | Failed) -> None:
        if output.index == 0:
            self.has_engine_end = True
            self.phases.add_details(wait=end.wait, residency=end.residency)

    def _end_output(
        self,
        output: LiveRequestOutput,
        reason: FinishReason,
        *,
        at_s: float,
        now_s: float,
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        output.is_live = output.is_plain = False
        output.end = OutputEnd(
            output_index=output.index,
            reason=reason,
            num_completion_tokens=output.text.num_tokens,
            stop_string=stop_string,
            stop_token_id=stop_token_id,
        )
        self._num_ended += 1
        has_more = self._num_ended < len(self.outputs)
        if output.is_running:
            output.is_running = False
            if self.phases.note_stopped(at_s, has_more=has_more):
                self._change_state(0)
        if has_more:
            self.stream.release_held()
        else:
            self.phases.stop(at_s)
            self.ends = tuple([output.end for output in self.outputs if output.end is not None])
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        ends, phases = self.ends, self.phases
        arrival_s, first_token_s = self.arrival_s, self.first_token_s
        self.stream.push(
            Finished(
                outputs=ends,
                usage=Usage(
                    num_prompt_tokens=self.num_prompt_tokens,
                    num_completion_tokens=sum([end.num_completion_tokens for end in ends]),
                    num_cached_prompt_tokens=self.num_cached_tokens,
                ),
                timings=Timings(
                    queue_s=phases.spent_s(QUEUE),
                    prefill_s=phases.spent_s(PREFILL),
                    decode_s=phases.spent_s(DECODE),
                    total_s=max(0.0, now_s - arrival_s),
                    ttft_s=None
                    if first_token_s == NO_TIME
                    else max(0.0, first_token_s - arrival_s),
                ),
                num_preemptions=self.num_preemptions,
            )
        )
        self.stream.close()
