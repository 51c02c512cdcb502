"""The matcher finds the same stop string as a search of the whole text, in whatever pieces the text
arrives.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.server.text.text_stream import StopMatcher, StopStrings

# Few letters, so that partial matches, overlaps and strings inside strings are the rule.
LETTERS = st.text(alphabet="ab\u00e9", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=5)
CUTS = st.lists(st.integers(0, 5), max_size=20)


def naive(text: str, stops: list[str], num_unarmed: int = 0) -> tuple[str, str] | None:
    """Return (text before the stop string, stop string) for the first stop string that ends after
    `num_unarmed` characters, the longest if several end there; None if there is none.
    """
    for end in range(num_unarmed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


def pieces(text: str, cuts: list[int]) -> list[str]:
    parts: list[str] = []
    for size in cuts:
        parts.append(text[:size])
        text = text[size:]
    return [*parts, text]


@given(text=LETTERS, stops=STOPS, cuts=CUTS, include=st.booleans())
def test_same_as_naive_search_for_any_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop_string=include)
    shown, consumed, stop = "", "", None
    for piece in pieces(text, cuts):
        consumed += piece
        out, stop = matcher.feed(piece)
        shown += out
        if stop is not None:
            break
        # The held text is the longest suffix of the text that begins a stop string.
        held = len(consumed) - len(shown)
        longest = max(
            size
            for size in range(len(consumed) + 1)
            if any(s.startswith(consumed[len(consumed) - size :]) for s in stops)
        )
        assert held == longest
    expected = naive(text, stops)
    if expected is None:
        assert stop is None
        assert shown + matcher.flush() == text
    else:
        before, found = expected
        assert stop == found
        assert shown == (before + found if include else before)
        assert matcher.flush() == ""


@given(before=LETTERS, after=LETTERS, stops=STOPS, cuts=CUTS)
def test_stops_complete_before_arming_do_not_count(
    before: str, after: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown, consumed = "", ""
    for piece in pieces(before, cuts):
        consumed += piece
        text, stop = matcher.feed(piece, is_armed=False)
        assert stop is None
        shown += text
        # Only a possible beginning of a stop string is held, not a complete one.
        held = consumed[len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
    text, stop = matcher.feed(after)
    shown += text
    expected = naive(before + after, stops, num_unarmed=len(before))
    if expected is None:
        assert stop is None
        assert shown + matcher.flush() == before + after
    else:
        assert stop == expected[1]
        # Text of a match that began before arming may have been shown already.
        assert (before + after).startswith(shown)
        assert len(shown) >= len(expected[0])
