"""The text of one output: detokenising and stop strings together.

Owns which text may be sent, which tokens belong to the output, whether a stop string ended it, and
that the stop token which ends it has no text. Does not know requests or messages.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.server.text.detokenizer import DetokenizerStream
from penstock.server.text.stop_strings import StopMatcher


# A named tuple, not a frozen dataclass as other values at borders: one is made for every token of
# every stream, and this costs half as much.
class TextDelta(NamedTuple):
    """The result of some tokens.

    `text`: may be sent now; it may lag behind the tokens. `num_tokens`: how many of the pushed
    tokens belong to the output, counted from the first: all of them unless a stop string was
    completed, then up to the one that completed it. `stop`: that stop string, returned once.
    """

    text: str
    num_tokens: int
    stop: str | None = None


_NOTHING = TextDelta(text="", num_tokens=0)


class TextStream:
    """One output. `num_tokens`: its tokens so far. `is_finished`: no more text follows."""

    __slots__ = (
        "_decoder",
        "_matcher",
        "_min_tokens",
        "_stop_ids",
        "is_finished",
        "matched_stop",
        "num_tokens",
    )

    def __init__(
        self,
        decoder: DetokenizerStream,
        matcher: StopMatcher | None,
        *,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`stop_ids`: tokens that end the output, which count and have no text.

        Stop strings completed before the output has `min_tokens` tokens do not end it, nor do stop
        tokens among those.
        """
        self._decoder = decoder
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self.num_tokens = 0
        self.is_finished = False
        self.matched_stop: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether tokens are only detokenised: there are no stop strings, and the output has not
        ended.

        Once false this stays so; true, it stays so until `finish`.
        """
        return self._matcher is None and not self.is_finished

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The next tokens, as plain integers. After the end they are ignored: `num_tokens` is 0."""
        if self.is_finished:
            return _NOTHING
        with_text = token_ids
        if not self._stop_ids.isdisjoint(token_ids):
            with_text = token_ids[: self._num_before_stop(token_ids)]
        if self._matcher is not None:
            return self._push_matching(self._matcher, token_ids, with_text)
        num_tokens = len(token_ids)
        self.num_tokens += num_tokens
        return TextDelta(self._decoder.push(with_text), num_tokens)

    def push_one(self, token_id: int) -> str:
        """The text for the next token while `is_plain`; otherwise call `push`."""
        self.num_tokens += 1
        if token_id in self._stop_ids and self.num_tokens > self._min_tokens:
            return ""
        return self._decoder.push_one(token_id)

    def finish(self) -> TextDelta:
        """The output ended: returns all text that was held back."""
        if self.is_finished:
            return _NOTHING
        self.is_finished = True
        text, stop = self._decoder.flush(), None
        if self._matcher is not None:
            text, stop = self._matcher.feed(text, is_armed=self._is_armed())
            if stop is None:
                text += self._matcher.flush()
            self.matched_stop = stop
        return TextDelta(text=text, num_tokens=0, stop=stop)

    def _num_before_stop(self, token_ids: Sequence[int]) -> int:
        """How many of the next tokens come before the stop token that ends the output."""
        for index in range(max(0, self._min_tokens - self.num_tokens), len(token_ids)):
            if token_ids[index] in self._stop_ids:
                return index
        return len(token_ids)

    def _push_matching(
        self, matcher: StopMatcher, token_ids: Sequence[int], with_text: Sequence[int]
    ) -> TextDelta:
        texts: list[str] = []
        for index, piece in enumerate(self._decoder.pieces(with_text), start=1):
            self.num_tokens += 1
            if not piece:
                continue
            text, stop = matcher.feed(piece, is_armed=self._is_armed())
            texts.append(text)
            if stop is not None:
                self.is_finished = True
                self.matched_stop = stop
                return TextDelta(text="".join(texts), num_tokens=index, stop=stop)
        self.num_tokens += len(token_ids) - len(with_text)
        return TextDelta(text="".join(texts), num_tokens=len(token_ids))

    def _is_armed(self) -> bool:
        return self.num_tokens >= self._min_tokens
