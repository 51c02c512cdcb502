"""The events of a stream, as domain values.

Owns the pieces in a stream's backlog, and the records of single tokens. Records are made from the
arrays of a step, which become Python lists once per step and only when needed. The gRPC layer
groups the pieces into messages and numbers them.
"""

from collections.abc import Sequence
from typing import NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState


class TopToken(NamedTuple):
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float


class TokenRecord(NamedTuple):
    """One token. `logprob`: None if not requested, or for the first token of a prompt."""

    token_id: int
    logprob: float | None = None
    rank: int = 0
    top: Sequence[TopToken] = ()


class IdRecords(Sequence[TokenRecord]):
    """Records of tokens that have only an id; each is made when it is read.

    A prompt has up to a hundred thousand of them.
    """

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
    """New output of one step for one output. A tuple: one is made per token and stream."""

    output_index: int
    text: str
    num_tokens: int
    records: Sequence[TokenRecord]


class PromptPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the prompt, as requested by echo or prompt logprobs: see `stream_head.py`."""

    text: str = ""
    records: Sequence[TokenRecord] = ()


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has queued the request. `estimated_queue_s`: its queue time, None if unknown.

    `num_dropped_messages`: chat messages that a window left out. `trace_id`: in hexadecimal, empty
    for an untraced request.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    estimated_queue_s: float | None = None
    num_dropped_messages: int = 0
    trace_id: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The request changed its state, or has a position in the queue.

    `queue_s`: time spent waiting so far. `queue_position`: requests ahead of it.
    `estimated_queue_s`: the remaining queue time. Both are None where unknown.
    """

    state: RequestState
    num_cached_prompt_tokens: int
    num_preemptions: int
    queue_s: float
    queue_position: int | None = None
    estimated_queue_s: float | None = None


class OutputEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one output. At most one of `stop_string` and `stop_token_id` is set."""

    output_index: int
    reason: FinishReason
    num_completion_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; completion tokens are the total of all outputs."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_prompt_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds. `ttft_s` is None if there was no token."""

    queue_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    ttft_s: float | None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """All outputs have finished."""

    outputs: tuple[OutputEnd, ...]
    usage: Usage
    timings: Timings
    num_preemptions: int


StreamEvent = Accepted | Progress | PromptPiece | TokensPiece | Finished


class LogprobRows:
    """The logprobs of one step, by row. Converts on first use."""

    __slots__ = ("_chosen", "_logprobs", "_ranks", "_top_ids", "_top_logprobs")

    def __init__(self, logprobs: TokenLogprobs | None) -> None:
        self._logprobs = logprobs
        self._chosen: Sequence[float] | None = None
        self._ranks: Sequence[int] = ()
        self._top_ids: Sequence[Sequence[int]] = ()
        self._top_logprobs: Sequence[Sequence[float]] = ()

    def record(self, row: int, token_id: int, num_logprobs: int) -> TokenRecord:
        """Return the record of the token in `row`, with `num_logprobs` alternatives.

        `num_logprobs` -1 requests the id alone. Raises ValueError if logprobs are requested and the
        step has none: a bug of the executor.
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
                raise ValueError("the step brought no logprobs")
            chosen: list[float] = self._logprobs.chosen.tolist()
            self._ranks = self._logprobs.ranks.tolist()
            self._top_ids = self._logprobs.top_ids.tolist()
            self._top_logprobs = self._logprobs.top_logprobs.tolist()
            self._chosen = chosen
        return self._chosen
