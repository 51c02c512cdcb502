"""The events of a stream, independent of their encoding.

Defines the events in the backlog of a stream, and the records of single tokens. Records are created
from the arrays of a step; these arrays are converted to Python lists at most once per step. The
gRPC layer groups events into messages and numbers the messages.
"""

from collections.abc import Sequence
from typing import NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import WaitReason
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState


class TopToken(NamedTuple):
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float


class TokenRecord(NamedTuple):
    """The id of one token and its log probability. `logprob` is None if it was not requested, and
    for the first token of a prompt. `rank` is 1 for the most likely token, 0 without `logprob`.
    `top` has the most likely tokens at the position."""

    token_id: int
    logprob: float | None = None
    rank: int = 0
    top: Sequence[TopToken] = ()


class IdRecords(Sequence[TokenRecord]):
    """Records of tokens that have only an id. Each record is created on access, because a prompt
    may have a hundred thousand tokens."""

    __slots__ = ("ids",)

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> TokenRecord: ...

    @overload
    def __getitem__(self, index: slice) -> "IdRecords": ...

    def __getitem__(self, index: int | slice) -> "TokenRecord | IdRecords":
        if isinstance(index, slice):
            return IdRecords(self.ids[index])
        return TokenRecord(int(self.ids[index]))


class TokensPiece(NamedTuple):
    """New text of one output, and its tokens. `records` is empty if neither ids nor logprobs are
    requested. A tuple, because one is created per token and stream, and a tuple is the cheapest
    type."""

    output_index: int
    text: str
    num_tokens: int
    records: Sequence[TokenRecord]


class PromptPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the prompt, for `echo` or prompt logprobs; see `stream_head.py`."""

    text: str = ""
    records: Sequence[TokenRecord] = ()


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The request is accepted. `estimated_queue_s` is its estimated queue time in seconds, None if
    unknown.

    `num_dropped_messages` is the number of chat messages that the chat window has removed.
    `trace_id` is the trace id in hexadecimal, empty for a request without a trace.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    estimated_queue_s: float | None = None
    num_dropped_messages: int = 0
    trace_id: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the request has changed, or its queue position is known.

    `queue_s` is the time spent in the queue so far, in seconds. `queue_position` is the number of
    requests ahead of it, `waits_for` is the reason for the wait, and `estimated_queue_s` is the
    estimated remaining queue time in seconds; each of these three is None if it is unknown.
    """

    state: RequestState
    num_cached_prompt_tokens: int
    num_preemptions: int
    queue_s: float
    queue_position: int | None = None
    waits_for: WaitReason | None = None
    estimated_queue_s: float | None = None


class OutputEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one output. Of `stop_string` and `stop_token_id`, at most one is set."""

    output_index: int
    reason: FinishReason
    num_completion_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of prompt and output tokens of a request. `num_completion_tokens` is the total of
    all outputs."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_prompt_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The time that a request spent in each phase and in total, in seconds. `ttft_s` is the time to
    first token, None if there was no token."""

    queue_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    ttft_s: float | None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a stream: all outputs have ended."""

    outputs: tuple[OutputEnd, ...]
    usage: Usage
    timings: Timings
    num_preemptions: int


StreamEvent = Accepted | Progress | PromptPiece | TokensPiece | Finished


class LogprobRows:
    """The log probabilities of the tokens of one engine step, one row per token. They are converted
    to Python values on first use."""

    __slots__ = ("_chosen", "_logprobs", "_ranks", "_top_ids", "_top_logprobs")

    def __init__(self, logprobs: TokenLogprobs | None) -> None:
        self._logprobs = logprobs
        self._chosen: Sequence[float] | None = None
        self._ranks: Sequence[int] = ()
        self._top_ids: Sequence[Sequence[int]] = ()
        self._top_logprobs: Sequence[Sequence[float]] = ()

    def record(self, row: int, token_id: int, num_logprobs: int) -> TokenRecord:
        """Return the record of the token in `row`, with at most `num_logprobs` of the most likely
        tokens.

        If `num_logprobs` is -1, the record has only the id. Raises ValueError if logprobs are
        requested and the step has none; this is an error of the executor.
        """
        if num_logprobs < 0:
            return TokenRecord(token_id)
        chosen = self._convert()
        top = zip(
            self._top_ids[row][:num_logprobs], self._top_logprobs[row][:num_logprobs], strict=True
        )
        return TokenRecord(
            token_id,
            chosen[row],
            self._ranks[row],
            tuple(TopToken(top_id, logprob) for top_id, logprob in top if top_id >= 0),
        )

    def _convert(self) -> Sequence[float]:
        if self._chosen is None:
            if self._logprobs is None:
                raise ValueError("the step has no logprobs")
            chosen: list[float] = self._logprobs.chosen.tolist()
            self._ranks = self._logprobs.ranks.tolist()
            self._top_ids = self._logprobs.top_ids.tolist()
            self._top_logprobs = self._logprobs.top_logprobs.tolist()
            self._chosen = chosen
        return self._chosen
