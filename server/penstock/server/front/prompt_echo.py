"""What a stream tells about its prompt, as asked for by echo or prompt logprobs.

Owns which tokens have been told already: a prompt that is computed again tells some twice. Does not
know streams.
"""

from collections.abc import Sequence

from penstock.scheduler.batch import TokenLogprobs
from penstock.server.front.events import IdRecords, PromptPiece, TokenRecord
from penstock.server.front.logprob_rows import LogprobRows


class PromptEcho:
    """The prompt of one request.

    `ids`: its tokens, where they are wanted. `text`: what echo delivers. `num_logprobs`: how many
    alternatives, -1 where logprobs are not wanted.
    """

    __slots__ = ("_ids", "_next_position", "_num_logprobs", "_text")

    def __init__(self, ids: Sequence[int] = (), text: str = "", *, num_logprobs: int = -1) -> None:
        self._ids = ids
        self._text = text
        self._num_logprobs = num_logprobs
        self._next_position = 1

    @property
    def is_told(self) -> bool:
        """Whether the engine has nothing more to say of it."""
        return self._num_logprobs < 0 or self._next_position >= len(self._ids)

    def opening(self) -> PromptPiece | None:
        """What can be told before anything is computed."""
        # The first token follows nothing, so the engine has no word about it.
        ids = self._ids if self._num_logprobs < 0 else self._ids[:1]
        if not self._text and not ids:
            return None
        return PromptPiece(text=self._text, records=IdRecords(ids))

    def rows(self, first_position: int, logprobs: TokenLogprobs) -> PromptPiece | None:
        """What rows for the tokens from `first_position` on tell that was not told before."""
        rows = LogprobRows(logprobs)
        num_skipped = max(0, self._next_position - first_position)
        records: list[TokenRecord] = []
        for row in range(num_skipped, len(logprobs.chosen)):
            position = first_position + row
            if position >= len(self._ids):
                break
            records.append(rows.record(row, self._ids[position], self._num_logprobs))
        if not records:
            return None
        self._next_position += len(records)
        return PromptPiece(records=tuple(records))
