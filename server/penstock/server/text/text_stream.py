"""Converts the tokens of one output to text, and finds stop strings in it.

Decides which text may be sent, which tokens belong to the output, and whether a stop string has
ended it. A stop token that ends the output has no text. A stop string is found regardless of
how the tokens split it; text that may be the start of a stop string is held back.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.server.text.detokenizer import DetokenizerStream


class StopStrings:
    """Compiled stop strings, shared by any number of matchers.

    The stop string that is completed first is reported. If several end at the same character, the
    longest is reported. This is the automaton of Aho and Corasick ("Efficient string matching: an
    aid to bibliographic search", 1975). A state is the longest suffix of the text that starts a
    stop string, so the number of characters to hold back is exactly the depth of the state.
    Building it takes time linear in the total length of the strings.
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
        """Set the failure transitions of all states, breadth first."""
        queue = deque(self.trie[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.trie[state].items():
                target = self.fail[state]
                while target and char not in self.trie[target]:
                    target = self.fail[target]
                self.fail[child] = self.trie[target].get(char, 0)
                queue.append(child)
            # A match of the failure state is shorter and ends at the same character.
            if self.match[state] is None:
                self.match[state] = self.match[self.fail[state]]


class StopMatcher:
    """Searches one text for stop strings. Call `feed` with its parts in order, then `flush`."""

    __slots__ = ("_held", "_includes_stop", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include_stop_string: bool = False) -> None:
        self._stops = stops
        self._includes_stop = include_stop_string
        self._state = 0
        self._held = ""

    def feed(self, piece: str, *, is_armed: bool = True) -> tuple[str, str | None]:
        """Add the next part of the text. Returns the text that may be sent now, and the completed
        stop string or None.

        If `is_armed` is False, stop strings that are completed in this piece are ignored. After a
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


# A named tuple instead of a frozen dataclass, because one is created per token and stream, and a
# tuple costs half as much.
class TextDelta(NamedTuple):
    """The result of adding tokens to a stream.

    Attributes:
        text: The text that may be sent now. It may lag behind the tokens.
        num_tokens: Number of the added tokens that belong to the output: all of them, or if a stop
            string was completed, the tokens up to and including the token that completed it.
        stop: The completed stop string; returned once, otherwise None.
    """

    text: str
    num_tokens: int
    stop: str | None = None


_NOTHING = TextDelta(text="", num_tokens=0)


class TextStream:
    """The text of one output.

    `num_tokens` is the number of its tokens so far. If `is_finished`, no more text follows.
    """

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
        """Create the stream. `stop_ids` are tokens that end the output; they are counted and have
        no text.

        A stop string that is completed before the output has `min_tokens` tokens does not end it. A
        stop token among the first `min_tokens` tokens does not end it either.
        """
        self._decoder = decoder
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self.num_tokens = 0
        self.is_finished = False

    @property
    def is_plain(self) -> bool:
        """True if tokens are only detokenised: there are no stop strings, and `finish` was not
        called. It never changes from False to True."""
        return self._matcher is None and not self.is_finished

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add the next tokens (plain integers). If `is_finished`, they are ignored, and the
        `num_tokens` of the result is 0."""
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
        """Add the next token and return the text that it completes. Call this only while
        `is_plain`; otherwise call `push`."""
        self.num_tokens += 1
        if token_id in self._stop_ids and self.num_tokens > self._min_tokens:
            return ""
        return self._decoder.push_one(token_id)

    def finish(self) -> TextDelta:
        """End the output and return all text that was held back. If this text completes a stop
        string, return only the part up to it."""
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
        """Return the number of `token_ids` before the stop token that ends the output, or the
        number of all if no stop token ends it."""
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
