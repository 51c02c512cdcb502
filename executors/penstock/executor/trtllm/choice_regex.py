"""A choice between texts as a regular expression that both guided decoding backends interpret
alike.

Owns the escaping. xgrammar reads an ECMAScript dialect and llguidance Rust's; what is written here
means the same in both: literal characters, backslashes before metacharacters, and `|`.
"""

from collections.abc import Iterable
from typing import Final

# Everything else stands for itself in both, and neither accepts a backslash before any character.
# No groups: older versions of xgrammar refuse non-capturing ones.
_ESCAPES: Final = str.maketrans({char: f"\\{char}" for char in "\\^$.|?*+()[]{}"})


def choice_regex(texts: Iterable[str]) -> str:
    """The expression that matches, as a whole, exactly the given texts."""
    return "|".join(text.translate(_ESCAPES) for text in texts)
