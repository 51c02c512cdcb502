"""How an integrity check is split into pieces, so that new requests wait for one piece only.

Owns the size of a piece and the form of the result. A check is an iterator that yields after each
piece: the fault it found, or an empty string. The checked data must not change between pieces.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeAlias, TypeVar

PIECE = 256
"""Blocks or entries per piece, well under a millisecond on a busy core too."""

Faults: TypeAlias = Iterator[str]
_T = TypeVar("_T")


def pieces(items: Iterable[_T]) -> Iterator[list[_T]]:
    """Yield `items` in lists of up to PIECE."""
    rest = iter(items)
    while piece := list(islice(rest, PIECE)):
        yield piece


def is_sorted(numbers: Iterable[float]) -> Iterator[bool]:
    """Whether each piece of `numbers` ascends, starting from the last number of the piece
    before.
    """
    last: list[float] = []
    for piece in pieces(numbers):
        joined = last + piece
        yield joined == sorted(joined)
        last = piece[-1:]
