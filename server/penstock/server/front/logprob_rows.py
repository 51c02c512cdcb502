"""Records of single tokens from the arrays of a whole step.

Arrays become Python lists once per step, and only when they are needed.
"""

from collections.abc import Sequence

from penstock.scheduler.batch import TokenLogprobs
from penstock.server.front.events import TokenRecord, TopToken


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
        """The record of the token in `row`, with `num_logprobs` alternatives.

        `num_logprobs` -1 asks for the id alone. Raises ValueError when logprobs are requested and
        the step has none: a bug of the executor.
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
