"""One request from acceptance to its end: its outputs merged into one stream, and its usage.

Owns the meaning of the engine's events for one request. Does not know gRPC, the engine port, or
other requests. Never blocks. Call every method on the event loop; times are seconds on the engine's
clock.
"""

from collections.abc import Sequence
from typing import TypeAlias

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import Admitted, Failed, Preempted, PrefixFound, Queued
from penstock.scheduler.events import Finished as EngineFinished
from penstock.scheduler.request import NO_TIME, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.front.errors import ENGINE_DOWN, Refusal, refusal_for
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
from penstock.server.front.generation import Generation
from penstock.server.front.live_output import CapturedText, LiveOutput
from penstock.server.front.phases import DECODE, PREFILL, QUEUE, PhaseClock
from penstock.server.front.stream import TokenStream
from penstock.server.front.stream_head import StreamHead, accepted_event
from penstock.server.front.submission import Submission
from penstock.server.text.text_stream import TextStream

OwnOutput: TypeAlias = "LiveOutput[LiveRequest]"

_REASON_NAMES = {reason: reason.name for reason in FinishReason}
_OWN_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class LiveRequest:
    """A request that has not been released yet.

    `ends`: of its outputs, once all have ended. `has_engine_end`: the engine has reported how its
    first output ended. `first_token_s`: NO_TIME before the first token. `is_cancelled`: its
    cancellation was sent to the engine. `num_replays`: engines that received it after the first.
    `is_detached`: no client reads it; it is kept here only to be sent to another engine.
    `is_catching_up`: its events wait here without a limit, because its client does not cause the
    delay.
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
        "is_cancelled",
        "is_catching_up",
        "is_detached",
        "is_released",
        "num_cached_tokens",
        "num_replays",
        "outputs",
        "phases",
        "request_id",
        "stream",
    )

    def __init__(self, request_id: str, generation: Generation, arrival_s: float) -> None:
        self.request_id = request_id
        self.generation = generation
        self.arrival_s = arrival_s
        self.stream = TokenStream(generation.output.chunks)
        self.head = StreamHead(self.stream)
        self.phases = PhaseClock(arrival_s)
        self.outputs: tuple[OwnOutput, ...] = ()
        self.ends: tuple[OutputEnd, ...] = ()
        self.num_cached_tokens = 0
        self.first_token_s = NO_TIME
        self.has_engine_end = False
        self.is_at_engine = False
        self.is_cancelled = False
        self.is_catching_up = False
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
        """Prepare the outputs and the head before submission; echo delivers `prompt_text`."""
        self._submission = submission
        self.phases.submit(now_s)
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
        """The tenant that the request belongs to."""
        return self.generation.tenant

    @property
    def trace_id(self) -> bytes:
        """The trace id, 16 bytes; empty for an untraced request."""
        return self.generation.trace_id

    @property
    def live_keys(self) -> tuple[int, ...]:
        """Keys of the outputs that have not ended, as far as this front knows."""
        return tuple([output.key for output in self.outputs if output.is_live])

    @property
    def num_queued(self) -> int:
        """Outputs that wait for a slot, as far as this front knows."""
        return sum([output.is_live and not output.is_running for output in self.outputs])

    @property
    def state(self) -> RequestState:
        """The state of the request."""
        if not self.stream.is_closed:
            return self.phases.state
        return RequestState.COMPLETED if self.stream.refusal is None else RequestState.ERROR

    def is_unread_since(self, since_s: float) -> bool:
        """Return whether it ended before `since_s`, and its reader started but did not finish."""
        is_over = self.stream.is_closed and not self.is_catching_up
        return is_over and self.phases.segments[-1].start_s < since_s

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Finish reasons of the outputs that have ended."""
        ends = self.ends or [output.end for output in self.outputs if output.end is not None]
        return tuple([_REASON_NAMES[end.reason] for end in ends])

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens; 0 before the prompt is tokenised."""
        return self._submission.specs[0].num_prompt_tokens if self._submission else 0

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, of all outputs."""
        return sum([output.text.num_tokens for output in self.outputs])

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far, of all outputs."""
        return sum([output.num_preemptions for output in self.outputs])

    @property
    def specs(self) -> tuple[RequestSpec, ...]:
        """The specs of the first submission; empty before `start`."""
        return self._submission.specs if self._submission else ()

    @property
    def submission(self) -> Submission | None:
        """The first submission, with the keys of the latest one."""
        return self._submission

    def on_queued(self, output: OwnOutput, change: Queued) -> None:
        """Report acceptance: the engine has queued the request."""
        if output.index == 0:
            self.head.queued(change, is_waiting=self.phases.phase is QUEUE)
        self.head.accept()

    def report_queue_position(self) -> None:
        """Call after all of a step's events: see `StreamHead.report_queue_position`."""
        self.head.report_queue_position(self.state, self.phases.spent_s(QUEUE))

    def on_admitted(self, output: OwnOutput, change: Admitted) -> None:
        """Handle an output's first or repeated admission to a slot."""
        self.head.accept()
        # A replay finds the request's own output in the cache, which must not count as cached
        # prompt.
        if output.index == 0 and change.num_preemptions == 0 and self.first_token_s == NO_TIME:
            self.num_cached_tokens = change.num_cached_tokens
        output.is_running = True
        num_cached = change.num_cached_tokens
        wait = change.wait if output.index == 0 else None
        if self.phases.admit(change.at_s, num_cached_tokens=num_cached, wait=wait):
            self._change_state(num_cached)

    def on_preempted(self, output: OwnOutput, change: Preempted) -> None:
        """Handle an output's loss of its slot: it waits again."""
        output.num_preemptions += 1
        output.is_running = False
        if output.index == 0:
            self.phases.explain(stay=change.stay)
        if self.phases.leave(change.at_s, has_more=True, num_tokens=self.num_output_tokens):
            self._change_state(0)

    def on_prefix_found(self, output: OwnOutput, change: PrefixFound) -> None:
        """Replace the predicted cached tokens by those that the executor reports."""
        if output.index == 0 and output.num_preemptions == 0 and self.first_token_s == NO_TIME:
            self.num_cached_tokens = change.num_cached_tokens
        if output.index == 0:
            self.phases.find_prefix(change.num_cached_tokens)

    def on_prompt_logprobs(self, first_position: int, logprobs: TokenLogprobs) -> None:
        """Push new rows for prompt tokens from `first_position` on; skip recomputed ones."""
        self.head.accept()
        for piece in self.head.prompt.rows(first_position, logprobs):
            self.stream.push(piece)

    def on_token(
        self,
        output: OwnOutput,
        token_id: int,
        *,
        at_s: float,
        now_s: float,
        rows: LogprobRows,
        row: int,
    ) -> bool:
        """Handle one new token. Return True if a stop string ended the output: the caller must
        notify the engine.
        """
        if not output.is_live:
            return False
        if output.num_repeating:
            self._check_repeated(output, token_id, at_s=at_s, now_s=now_s)
            return False
        output.token_ids.append(token_id)
        # This runs for every token that is not plain text: checks are inlined where they rarely
        # hold.
        if self.head.is_due:
            self.head.accept()
        if self.phases.phase is not DECODE:
            self.phases.token(at_s)
        if self.first_token_s == NO_TIME:
            self.first_token_s = now_s
        records: Sequence[TokenRecord] = ()
        if self._wants_records:
            records = (rows.record(row, token_id, self.generation.output.num_logprobs),)
        elif output.text.is_plain and output.index == 0 and output.captured is None:
            # Nothing else is left to do for it, until the state changes.
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

    def on_finished(self, output: OwnOutput, end: EngineFinished, now_s: float) -> None:
        """Handle an output that the engine completed."""
        self._note_engine_end(output, end)
        if not output.is_live:
            return
        if output.num_repeating and end.reason in _OWN_ENDS:
            # It ended before its earlier length: this is a different output.
            self.fail(ENGINE_DOWN, now_s)
            return
        self.head.accept()
        delta = output.text.finish()
        if delta.text:
            self.stream.push(TokensPiece(output.index, delta.text, delta.num_tokens, ()))
            if output.captured is not None:
                output.captured.add(delta.text)
        reason = FinishReason.STOP if delta.stop is not None else end.reason
        # The model's own end-of-sequence token is the normal end and is not reported.
        is_asked_for = end.stop_id in self.generation.stopping.stop_token_ids
        self._end_output(
            output,
            reason,
            at_s=end.at_s,
            now_s=now_s,
            stop_string=delta.stop,
            stop_token_id=end.stop_id if is_asked_for and delta.stop is None else None,
        )

    def on_failed(self, output: OwnOutput, end: Failed) -> None:
        """Fail the whole request: the engine refused or failed an output."""
        self._note_engine_end(output, end)
        if not output.is_live:
            return
        output.is_live = output.is_plain = False
        submission = self._submission
        self.fail(
            refusal_for(
                end,
                self.generation,
                phases=self.phases,
                deadline_kind=submission.deadline_kind if submission else "server",
                tenant=self.tenant,
            ),
            end.at_s,
        )

    def fail(self, refusal: Refusal, now_s: float) -> None:
        """End the request with an error. Idempotent; wakes the writer."""
        self.phases.stop(now_s)
        self.stream.fail(refusal)
        self.stream.wake()

    def suspend(self, now_s: float) -> None:
        """Make the request wait for another engine, which continues where this one stopped."""
        self.head.accept()
        self.is_at_engine = False
        for output in self.outputs:
            output.is_plain = output.is_running = False
        if self.phases.lose(now_s, num_tokens=self.num_output_tokens):
            self._change_state(0)
        self.stream.wake()

    def resubmit(self, submission: Submission, now_s: float) -> None:
        """Record the submission to another engine. `submission`: the first one with new keys."""
        self._submission = submission
        self.num_replays += 1
        self.phases.resubmit(now_s)

    def cancel_unsubmitted(self, model: str, now_s: float) -> None:
        """End a request that was cancelled before submission as the engine would have."""
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
        self, output: OwnOutput, token_id: int, *, at_s: float, now_s: float
    ) -> None:
        self.phases.token(at_s)
        if not output.repeats(token_id):
            # The continuation would not match what was delivered.
            self.fail(ENGINE_DOWN, now_s)

    def _change_state(self, num_cached_tokens: int) -> None:
        """Report that the request runs or waits again; `on_token` times the next token."""
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

    def _note_engine_end(self, output: OwnOutput, end: EngineFinished | Failed) -> None:
        if output.index == 0:
            self.has_engine_end = True
            self.phases.explain(wait=end.wait, stay=end.stay)

    def _end_output(
        self,
        output: OwnOutput,
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
            if self.phases.leave(at_s, has_more=has_more):
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
