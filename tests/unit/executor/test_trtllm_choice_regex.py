"""A choice as a regular expression matches exactly its texts, whatever characters they have."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.executor.trtllm.constraint_check import choice_regex

METACHARACTERS = "\\^$.|?*+()[]{}"
NASTY = st.text(alphabet=METACHARACTERS + "ab\"'/-#& \n\r\té😀,0\u2028", min_size=1, max_size=8)


@given(st.lists(NASTY, min_size=1, max_size=6), NASTY)
def test_it_matches_exactly_the_choices(texts: list[str], other: str) -> None:
    pattern = re.compile(choice_regex(texts))
    assert all(pattern.fullmatch(text) for text in texts)
    assert (pattern.fullmatch(other) is not None) is (other in texts)


@given(st.text(min_size=1))
def test_any_text_at_all_matches_itself(text: str) -> None:
    assert re.fullmatch(choice_regex([text]), text)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('say "yes"', 'say "yes"'),
        ("it's", "it's"),
        ("a\\b", "a\\\\b"),
        ("two\nlines", "two\nlines"),
        ("1-2 / 3 # &~<>", "1-2 / 3 # &~<>"),
        ("ünï😀", "ünï😀"),
        ("{x}[y](z)", r"\{x\}\[y\]\(z\)"),
        ("^a.b*c+d?e$|f", r"\^a\.b\*c\+d\?e\$\|f"),
    ],
)
def test_only_metacharacters_get_a_backslash(text: str, pattern: str) -> None:
    """Rust's dialect rejects a backslash before a letter or a space; ECMAScript gives some a
    meaning.
    """
    assert choice_regex([text]) == pattern


def test_there_are_no_groups() -> None:
    assert choice_regex(["yes", "no", "(?:)"]) == r"yes|no|\(\?:\)"
