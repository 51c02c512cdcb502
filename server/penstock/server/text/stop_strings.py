"""Finds stop strings in text that arrives in pieces.

Owns the search and the hold-back of text that may start a stop string. Does not know tokens. The
result depends on the whole text alone, not on how it was split.
"""

import re
from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Stop strings, compiled once; shared by any number of matchers.

    The first one to be complete wins; of several that end at the same character, the longest. This
    is the automaton of Aho and Corasick ("Efficient string matching: an aid to bibliographic
    search", 1975): a state is the longest suffix of the text that starts a stop string, so exactly
    the depth of the state must be held back. Built in the total length of the strings.
    """

    __slots__ = ("depth", "fail", "find_start", "has_children", "match", "strings", "trie")

    def __init__(self, strings: Sequence[str]) -> None:
        """Raises ValueError if there is no string or an empty one."""
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
        """The fail transitions of all states, breadth first."""
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
    """The search in one text. Feed its pieces in order, then `flush`."""

    __slots__ = ("_held", "_includes_stop", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include_stop_string: bool = False) -> None:
        self._stops = stops
        self._includes_stop = include_stop_string
        self._state = 0
        self._held = ""

    def feed(self, piece: str, *, is_armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece; returns the text that may be sent now, and the stop string it
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
        """The text still held back: it started a stop string that was not completed."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stopped(self, piece: str, stop: str) -> str:
        text = self.flush() + piece
        return text if self._includes_stop else text[: len(text) - len(stop)]
