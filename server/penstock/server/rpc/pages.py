"""Paged lists, with opaque page tokens.

A token names the last entry of a page and the filters of the list, so that the next page continues
there, whatever was added or removed meanwhile, and a token of another list is refused.
"""

import base64
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Place = tuple[float, str, str]
"""The sort key of entries; unique."""
MAX_TOKEN_CHARS = 4096


class BadPageToken(ValueError):
    """Not a token of this list."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some entries. `next_token` is empty on the last page."""

    entries: tuple[T, ...]
    next_token: str


def page_of(
    entries: Sequence[T],
    place_of: Callable[[T], Place],
    *,
    size: int,
    token: str,
    filters: bytes,
) -> Page[T]:
    """The page of `entries` (sorted) that starts at `token`.

    `filters` identifies the list. Raises BadPageToken.
    """
    digest = zlib.crc32(filters)
    if token:
        entries = _after(_decode(token, digest), entries, place_of)
    page = tuple(entries[:size])
    is_last = len(entries) <= size
    return Page(page, "" if is_last else _encode(place_of(page[-1]), digest))


def _after(place: Place, entries: Sequence[T], place_of: Callable[[T], Place]) -> Sequence[T]:
    """By name while the entry exists: the clock behind its arrival may have been set since."""
    for index, entry in enumerate(entries):
        if place_of(entry)[1:] == place[1:]:
            return entries[index + 1 :]
    return [entry for entry in entries if place_of(entry) > place]


def _encode(place: Place, digest: int) -> str:
    body = json.dumps([digest, *place], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4) + body).decode()


def _decode(token: str, digest: int) -> Place:
    try:
        if len(token) > MAX_TOKEN_CHARS:
            raise BadPageToken
        packed = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        if zlib.crc32(packed[4:]) != int.from_bytes(packed[:4]):
            raise BadPageToken
        given, at_s, tenant, request_id = json.loads(packed[4:])
    except (ValueError, TypeError, RecursionError):  # the sender can compute the checksum too
        raise BadPageToken from None
    is_place = isinstance(at_s, float) and isinstance(tenant, str) and isinstance(request_id, str)
    # Python reads Infinity and NaN as JSON, and no entry comes after them.
    if given != digest or not is_place or not math.isfinite(at_s):
        raise BadPageToken
    return at_s, tenant, request_id
