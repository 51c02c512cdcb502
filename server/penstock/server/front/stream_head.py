"""The events of a stream before its output: acceptance, prompt, queue position.

Owns when they are sent. The first message waits a little for the engine's first event, so that a
refusal comes before it and clients may retry. Does not know other requests.
"""

import asyncio
from dataclasses import replace

from penstock.scheduler.events import Queued
from penstock.scheduler.state import RequestState
from penstock.server.front.events import Accepted, Progress
from penstock.server.front.generation import Output
from penstock.server.front.prompt_echo import PromptEcho
from penstock.server.front.stream import TokenStream
from penstock.server.front.submission import Submission


def accepted_event(
    request_id: str, submission: Submission, wanted: Output, *, model: str, prompt_text: str
) -> tuple[Accepted, PromptEcho]:
    """The first events of a request that is submitted; echo delivers `prompt_text`."""
    leader = submission.specs[0]
    has_ids = wanted.num_prompt_logprobs >= 0 or (wanted.echo and wanted.return_token_ids)
    prompt = PromptEcho(
        leader.prompt_ids if has_ids else leader.prompt_ids[:0],
        prompt_text,
        num_logprobs=wanted.num_prompt_logprobs,
    )
    accepted = Accepted(
        request_id=request_id,
        model=model,
        num_prompt_tokens=leader.num_prompt_tokens,
        seed=submission.seed,
        num_dropped_messages=submission.num_dropped_messages,
        trace_id=leader.trace_id.hex(),
    )
    return accepted, prompt


class StreamHead:
    """The head of one stream. `prompt`: the part of the prompt to deliver.

    `is_due`: the acceptance was not sent yet. `place`: the first queue position.
    """

    __slots__ = ("_accepted", "_stream", "_timer", "_unreported_place", "is_due", "place", "prompt")

    def __init__(self, stream: TokenStream) -> None:
        self.prompt = PromptEcho()
        self.is_due = False
        self.place: Queued | None = None
        self._stream = stream
        self._accepted: Accepted | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unreported_place: Queued | None = None

    def prepare(self, accepted: Accepted, prompt: PromptEcho) -> None:
        """Set the acceptance and the prompt, to be sent later."""
        self._accepted, self.prompt = accepted, prompt
        self.is_due = True

    def accept_after(self, delay_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Send the acceptance after a delay, unless the engine's first event comes before."""

        def accept() -> None:
            self.accept()
            self._stream.wake()

        self._timer = loop.call_later(delay_s, accept)

    def stop_waiting(self) -> None:
        """The stream has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def accept(self) -> None:
        """The engine has queued the request: send the acceptance, once, and the prompt. Does not
        wake the writer.
        """
        accepted, self._accepted = self._accepted, None
        if accepted is None:
            return
        self.is_due = False
        self.stop_waiting()
        if self._unreported_place is not None:
            estimate_s = self._unreported_place.estimated_queue_s
            accepted = replace(accepted, estimated_queue_s=estimate_s)
        self._stream.push(accepted)
        for piece in self.prompt.head():
            self._stream.push(piece)

    def queued(self, place: Queued, *, is_waiting: bool) -> None:
        """The first output is queued; `is_waiting`: none of the others runs."""
        if self.place is None:
            self.place = place
        if is_waiting:
            self._unreported_place = place

    def report_queue_position(self, state: RequestState, queue_s: float) -> None:
        """After all of a step's events: send the queue position, if it still waits.

        Only once and only behind other requests: one that runs in the step that queued it has no
        queue position.
        """
        place, self._unreported_place = self._unreported_place, None
        if place is None or not place.num_ahead or state is not RequestState.PENDING:
            return
        self._stream.push(
            Progress(
                state=RequestState.PENDING,
                num_cached_prompt_tokens=0,
                num_preemptions=0,
                queue_s=queue_s,
                queue_position=place.num_ahead,
                estimated_queue_s=place.estimated_queue_s,
            )
        )
