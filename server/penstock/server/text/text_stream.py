"""The text of one output: detokenising and stop strings together.

Owns which text may be sent, which tokens belong to the output, whether a stop string ended it, and
that the stop token which ends it has no text. A stop string is found in the whole text, however it
was split; text that may start a stop string is held back. Does not know requests or messages.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.server.text.detokenizer import DetokenizerStream


class StopStrings:
    """Stop strings, compiled once; shared by any number of matchers.

    The first one to be complete wins; of several that end at the same character, the longest. This
    is the automaton of Aho and Corasick ("Efficient string matching: an aid to bibliographic
    search", 1975). A state is the longest suffix of the text that starts a stop string, so exactly
    the depth of the state must be held back. Building it takes time linear in the total length of
    the strings.
    """

    __slots__ = ("depth", "fail", "find_start", "has_children", "match", "strings", "trie")

    def __init__(self, strings: Sequence[str]) -> None:
        """Compile the strings. Raises ValueError if there is none or one is empty."""
        if not strings or not all(strings):
            raise ValueError("stop strings must not be empty")
        self.strings = tuple(dict.fromkeys(strings))
        self.trie: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]
        for string in self.strings:
            self._add(string)
        self.fail = [0] * len(self.trie)
        self._link()
        first = "".join(re.escape(char) for char in sorted(self.trie[0]))
        self.find_start = re.compile(f"[{first}]").search

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            child = self.trie[state].get(char)
            if child is None:
                child = len(self.trie)
                self.trie[state][char] = child
                self.trie.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = child
        self.match[state] = string

    def _link(self) -> None:
        """Set the fail transitions of all states, breadth first."""
        queue = deque(self.trie[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.trie[state].items():
                target = self.fail[state]
                while target and char not in self.trie[target]:
                    target = self.fail[target]
                self.fail[child] = self.trie[target].get(char, 0)
                queue.append(child)
            # A match of the fail state is shorter, and ends at the same character.
            if self.match[state] is None:
                self.match[state] = self.match[self.fail[state]]


class StopMatcher:
    """Searches one text. Feed its pieces in order, then `flush`."""

    __slots__ = ("_held", "_includes_stop", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include_stop_string: bool = False) -> None:
        self._stops = stops
        self._includes_stop = include_stop_string
        self._state = 0
        self._held = ""

    def feed(self, piece: str, *, is_armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return the text that may be sent now, and the stop string that it
        completed.

        While not `is_armed`, stop strings that become complete in this piece do not count. After a
        match the matcher must not be used again.
        """
        stops = self._stops
        trie, fail, match = stops.trie, stops.fail, stops.match
        state = self._state
        position, length = 0, len(piece)
        while position < length:
            if not state:
                start = stops.find_start(piece, position)
                if start is None:
                    break
                position = start.start()
            char = piece[position]
            while (child := trie[state].get(char, 0)) == 0 and state:
                state = fail[state]
            state = child
            position += 1
            if (stop := match[state]) is None:
                continue
            if is_armed:
                return self._stopped(piece[:position], stop), stop
            while state and not trie[state]:
                state = fail[state]
        if not state and not self._state:
            return piece, None
        self._state = state
        text = self._held + piece
        num_released = len(text) - stops.depth[state]
        self._held = text[num_released:]
        return text[:num_released], None

    def flush(self) -> str:
        """Return the text held back: the start of a stop string that was not completed."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stopped(self, piece: str, stop: str) -> str:
        text = self.flush() + piece
        return text if self._includes_stop else text[: len(text) - len(stop)]


# A named tuple, not a frozen dataclass like other values at interfaces: one is made for every token
# of every stream, and a tuple costs half as much.
class TextDelta(NamedTuple):
    """The result of some tokens.

    `text`: may be sent now; it may lag behind the tokens. `num_tokens`: how many of the pushed
    tokens belong to the output: all, or, if a stop string was completed, those up to the token that
    completed it. `stop`: that stop string, returned once.
    """

    text: str
    num_tokens: int
    stop: str | None = None


_NOTHING = TextDelta(text="", num_tokens=0)


class TextStream:
    """One output's text. `num_tokens`: its tokens so far. `is_finished`: no more text follows."""

    __slots__ = (
        "_decoder",
        "_matcher",
        "_min_tokens",
        "_stop_ids",
        "is_finished",
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
        """`stop_ids`: tokens that end the output; they count and have no text.

        A stop string completed before the output has `min_tokens` tokens does not end it, nor does
        a stop token among the first `min_tokens`.
        """
        self._decoder = decoder
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self.num_tokens = 0
        self.is_finished = False

    @property
    def is_plain(self) -> bool:
        """Whether tokens are only detokenised: there are no stop strings, and the output has not
        ended.

        False is final; True holds until `finish`.
        """
        return self._matcher is None and not self.is_finished

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add the next tokens (plain integers). After the end, ignore them: `num_tokens` is 0."""
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
        """Return the text for the next token while `is_plain`; otherwise call `push`."""
        self.num_tokens += 1
        if token_id in self._stop_ids and self.num_tokens > self._min_tokens:
            return ""
        return self._decoder.push_one(token_id)

    def finish(self) -> TextDelta:
        """End the output; return all text that was held back."""
        if self.is_finished:
            return _NOTHING
        self.is_finished = True
        text, stop = self._decoder.flush(), None
        if self._matcher is not None:
            text, stop = self._matcher.feed(text, is_armed=self._is_armed())
            if stop is None:
                text += self._matcher.flush()
        return TextDelta(text=text, num_tokens=0, stop=stop)

    def _num_before_stop(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens precede the stop token that ends the output."""
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
                return TextDelta(text="".join(texts), num_tokens=index, stop=stop)
        self.num_tokens += len(token_ids) - len(with_text)
        return TextDelta(text="".join(texts), num_tokens=len(token_ids))

    def _is_armed(self) -> bool:
        return self.num_tokens >= self._min_tokens
