"""The prompt in a stream, for echo and prompt logprobs.

Owns which tokens were delivered (a recomputed prompt repeats some), and the parts of a long prompt:
a writer takes one per iteration of the event loop. Does not know streams.
"""

from collections.abc import Iterator, Sequence
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import TokenLogprobs
from penstock.server.front.events import IdRecords, PromptPiece, TokenRecord
from penstock.server.front.logprob_rows import LogprobRows

MAX_PART_CHARS: Final = 16 << 10
MAX_PART_IDS: Final = 4096
MAX_PART_LOGPROBS: Final = 1280
"""Per part, each some two milliseconds of writing; a row has its token's and the alternatives'."""
_NO_IDS: Final = np.empty(0, dtype=np.int32)


class PromptEcho:
    """The prompt of one request.

    `ids`: its tokens, if requested. `text`: delivered by echo. `num_logprobs`: how many
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
        """The part that needs no computation."""
        for start in range(0, len(self._text), MAX_PART_CHARS):
            yield PromptPiece(text=self._text[start : start + MAX_PART_CHARS])
        # The first token has no predecessor, so it has no log probability.
        ids = self._ids if self._num_logprobs < 0 else self._ids[:1]
        for start in range(0, len(ids), MAX_PART_IDS):
            yield PromptPiece(records=IdRecords(ids[start : start + MAX_PART_IDS]))

    def rows(self, first_position: int, logprobs: TokenLogprobs) -> Iterator[PromptPiece]:
        """The new part of rows for the tokens from `first_position` on."""
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
