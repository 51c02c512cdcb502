"""The events of a stream before its output: acceptance, prompt, queue position.

Owns when they are sent. The first message waits a little for the engine's first event, so that a
refusal precedes it and clients may retry. Does not know other requests.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import Queued
from penstock.scheduler.state import RequestState
from penstock.server.front.events import (
    Accepted,
    IdRecords,
    LogprobRows,
    Progress,
    PromptPiece,
    TokenRecord,
)
from penstock.server.front.generation import Output
from penstock.server.front.stream import TokenStream
from penstock.server.front.submission import Submission

MAX_PART_CHARS: Final = 16 << 10
MAX_PART_IDS: Final = 4096
MAX_PART_LOGPROBS: Final = 1280
"""Bounds of one part, each some two milliseconds of writing. A row has the log probabilities of its
token and of the alternatives.
"""
_NO_IDS: Final = np.empty(0, dtype=np.int32)


class PromptEcho:
    """The prompt of one request.

    `ids`: its tokens, if requested. `text`: the text that echo delivers. `num_logprobs`: number of
    alternatives, -1 without logprobs.
    """

    __slots__ = ("_ids", "_next_position", "_num_logprobs", "_text")

    def __init__(
        self, ids: NDArray[np.int32] = _NO_IDS, text: str = "", *, num_logprobs: int = -1
    ) -> None:
        self._ids = ids
        self._text = text
        self._num_logprobs = num_logprobs
        self._next_position = 1

    @property
    def is_delivered(self) -> bool:
        """Whether everything has been delivered."""
        return self._num_logprobs < 0 or self._next_position >= len(self._ids)

    def head(self) -> Iterator[PromptPiece]:
        """Yield the part that needs no computation."""
        for start in range(0, len(self._text), MAX_PART_CHARS):
            yield PromptPiece(text=self._text[start : start + MAX_PART_CHARS])
        # The first token has no predecessor, so it has no log probability.
        ids = self._ids if self._num_logprobs < 0 else self._ids[:1]
        for start in range(0, len(ids), MAX_PART_IDS):
            yield PromptPiece(records=IdRecords(ids[start : start + MAX_PART_IDS]))

    def rows(self, first_position: int, logprobs: TokenLogprobs) -> Iterator[PromptPiece]:
        """Yield the new part of rows for the tokens from `first_position` on."""
        end = min(first_position + len(logprobs.chosen), len(self._ids))
        num_rows = max(1, MAX_PART_LOGPROBS // (1 + self._num_logprobs))
        for start in range(max(self._next_position, first_position), end, num_rows):
            self._next_position = min(start + num_rows, end)
            rows = slice(start - first_position, self._next_position - first_position)
            ids = self._ids[start : self._next_position]
            yield PromptPiece(records=_RowRecords(ids, logprobs.take(rows), self._num_logprobs))


class _RowRecords(Sequence[TokenRecord]):
    """Records of tokens with their logprobs; made when they are read."""

    __slots__ = ("_ids", "_logprobs", "_num_logprobs")

    def __init__(self, ids: NDArray[np.int32], logprobs: TokenLogprobs, num_logprobs: int) -> None:
        self._ids = ids
        self._logprobs = logprobs
        self._num_logprobs = num_logprobs

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[TokenRecord]:
        rows = LogprobRows(self._logprobs)
        for row, token_id in enumerate(self._ids.tolist()):
            yield rows.record(row, token_id, self._num_logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenRecord: ...

    @overload
    def __getitem__(self, index: slice) -> "_RowRecords": ...

    def __getitem__(self, index: int | slice) -> "TokenRecord | _RowRecords":
        if isinstance(index, slice):
            return _RowRecords(self._ids[index], self._logprobs.take(index), self._num_logprobs)
        return list(self)[index]


def accepted_event(
    request_id: str, submission: Submission, wanted: Output, *, model: str, prompt_text: str
) -> tuple[Accepted, PromptEcho]:
    """Return the acceptance and the prompt of a submitted request; echo delivers `prompt_text`."""
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
        """Set the acceptance and the prompt, which are sent later."""
        self._accepted, self.prompt = accepted, prompt
        self.is_due = True

    def accept_after(self, delay_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Send the acceptance after a delay, unless the engine's first event comes first."""

        def accept() -> None:
            self.accept()
            self._stream.wake()

        self._timer = loop.call_later(delay_s, accept)

    def stop_waiting(self) -> None:
        """Cancel the delayed acceptance."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def accept(self) -> None:
        """Send the acceptance, once, and the prompt. Does not wake the writer."""
        accepted, self._accepted = self._accepted, None
        if accepted is None:
            return
        self.is_due = False
        self.stop_waiting()
        if self._unreported_place is not None:
            estimate_s = self._unreported_place.estimated_queue_s
            accepted = msgspec.structs.replace(accepted, estimated_queue_s=estimate_s)
        self._stream.push(accepted)
        for piece in self.prompt.head():
            self._stream.push(piece)

    def queued(self, place: Queued, *, is_waiting: bool) -> None:
        """Record the first output's queue position. `is_waiting`: no other output runs."""
        if self.place is None:
            self.place = place
        if is_waiting:
            self._unreported_place = place

    def report_queue_position(self, state: RequestState, queue_s: float) -> None:
        """Send the queue position, after all of a step's events, if the request still waits.

        Sent only once, and only behind other requests: a request that runs in the step that queued
        it has no queue position.
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
