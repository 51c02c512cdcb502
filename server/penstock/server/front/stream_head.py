"""Sends the events of a stream before its output: acceptance (`Accepted`), prompt, queue position.

Decides when they are sent. The first message waits briefly for the engine's first event, so that a
rejected request fails before its first message and the client may retry it.
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
"""Limits of one part of a prompt. Writing a part of this size takes about 2 ms. MAX_PART_LOGPROBS
limits the log probabilities: those of the prompt tokens and of the most likely tokens at their
positions."""
_NO_IDS: Final = np.empty(0, dtype=np.int32)


class EchoedPrompt:
    """The prompt of one request, as the client requested to receive it.

    `ids` are its tokens, if requested. `text` is the text for echo. `num_logprobs` is the number of
    most likely tokens per position, -1 without logprobs.
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
        """True unless tokens with logprobs remain to be delivered."""
        return self._num_logprobs < 0 or self._next_position >= len(self._ids)

    def head(self) -> Iterator[PromptPiece]:
        """Yield the text and the ids of the prompt. Both are known before the engine has computed
        the prompt.

        With logprobs, yields the text and only the first id, because the first id has no log
        probability.
        """
        for start in range(0, len(self._text), MAX_PART_CHARS):
            yield PromptPiece(text=self._text[start : start + MAX_PART_CHARS])
        # The first token has no predecessor, so it has no log probability.
        ids = self._ids if self._num_logprobs < 0 else self._ids[:1]
        for start in range(0, len(ids), MAX_PART_IDS):
            yield PromptPiece(records=IdRecords(ids[start : start + MAX_PART_IDS]))

    def rows(self, first_position: int, logprobs: TokenLogprobs) -> Iterator[PromptPiece]:
        """Yield the tokens from `first_position` on with their logprobs, in parts. Tokens that were
        yielded before are left out."""
        end = min(first_position + len(logprobs.chosen), len(self._ids))
        num_rows = max(1, MAX_PART_LOGPROBS // (1 + self._num_logprobs))
        for start in range(max(self._next_position, first_position), end, num_rows):
            self._next_position = min(start + num_rows, end)
            rows = slice(start - first_position, self._next_position - first_position)
            ids = self._ids[start : self._next_position]
            yield PromptPiece(records=_RowRecords(ids, logprobs.take(rows), self._num_logprobs))


class _RowRecords(Sequence[TokenRecord]):
    """Records of tokens with their logprobs. Each record is created on access."""

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
) -> tuple[Accepted, EchoedPrompt]:
    """Return the acceptance and the prompt for the stream of a request. `prompt_text` is the prompt
    to echo, empty without echo."""
    leader = submission.specs[0]
    has_ids = wanted.num_prompt_logprobs >= 0 or (wanted.echo and wanted.return_token_ids)
    prompt = EchoedPrompt(
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
    """The events of one stream before its output. `prompt` is the prompt, as far as the client
    requested it.

    `is_due` is True from `prepare` until the acceptance is sent. `queue_position` is the first
    queue position of the first output, None before it is known.
    """

    __slots__ = (
        "_accepted",
        "_stream",
        "_timer",
        "_unreported_position",
        "is_due",
        "prompt",
        "queue_position",
    )

    def __init__(self, stream: TokenStream) -> None:
        self.prompt = EchoedPrompt()
        self.is_due = False
        self.queue_position: Queued | None = None
        self._stream = stream
        self._accepted: Accepted | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unreported_position: Queued | None = None

    def prepare(self, accepted: Accepted, prompt: EchoedPrompt) -> None:
        """Store the acceptance and the prompt, to send them later."""
        self._accepted, self.prompt = accepted, prompt
        self.is_due = True

    def accept_after(self, delay_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Send the acceptance after `delay_s` seconds and wake the writer, unless `accept` sends it
        earlier or `stop_waiting` cancels it."""

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
        """Send the acceptance and the prompt, unless they were sent already. Does not wake the
        writer."""
        accepted, self._accepted = self._accepted, None
        if accepted is None:
            return
        self.is_due = False
        self.stop_waiting()
        if self._unreported_position is not None:
            estimate_s = self._unreported_position.estimated_queue_s
            accepted = msgspec.structs.replace(accepted, estimated_queue_s=estimate_s)
        self._stream.push(accepted)
        for piece in self.prompt.head():
            self._stream.push(piece)

    def note_queued(self, position: Queued, *, is_waiting: bool) -> None:
        """Store the queue position of the first output, to be reported only if `is_waiting`, i.e.
        if no output runs."""
        if self.queue_position is None:
            self.queue_position = position
        if is_waiting:
            self._unreported_position = position

    def report_queue_position(self, state: RequestState, queue_s: float) -> None:
        """Send the queue position if the request still waits. Call this after all events of a step.

        It is sent once per submission, and only if other requests are ahead. A request that runs in
        the step in which it was queued has no queue position.
        """
        position, self._unreported_position = self._unreported_position, None
        if position is None or not position.num_ahead or state is not RequestState.PENDING:
            return
        self._stream.push(
            Progress(
                state=RequestState.PENDING,
                num_cached_prompt_tokens=0,
                num_preemptions=0,
                queue_s=queue_s,
                queue_position=position.num_ahead,
                waits_for=position.waits_for,
                estimated_queue_s=position.estimated_queue_s,
            )
        )
