"""The frames by which a front hears what is cached: the wish for it, and the news.

Owns the values and how they are written and read. Does not know who keeps the book of it.
"""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.scheduler.cache_book import CacheChange, CachedBlock
from penstock.server.link.wire import LinkError, Reader, Writer

_DIGEST_BYTES = 16
_LOST, _FIRST, _CHILD = range(3)
"""A block that is forgotten, the first of a chain, one that has a parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Tell what is cached of what is hashed from `salt`, and go on telling. `ticket`: 32 bits."""

    ticket: int
    salt: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfollow:
    """Tell no more under this ticket."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """Which part of a snapshot: `index` from 0, of `num_parts` with `num_blocks` in all of them."""

    index: int
    num_parts: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNews:
    """What has changed since the last news of this ticket, in that order.

    With `part`: no changes but what there is; whatever was told before part 0 is void.
    """

    ticket: int
    changes: tuple[CacheChange, ...]
    part: SnapshotPart | None = None


CacheFrame: TypeAlias = Follow | Unfollow | CacheNews


def write_follow(out: Writer, frame: Follow) -> None:
    """The body of a wish."""
    out.u32(frame.ticket)
    out.blob(frame.salt)


def write_cache_news(out: Writer, news: CacheNews) -> None:
    """The body of the news, by columns. Raises LinkError for a digest of another length."""
    out.u32(news.ticket)
    part = news.part
    out.u8(part is not None)
    if part is not None:
        for value in (part.index, part.num_parts, part.num_blocks):
            out.u32(value)
    kinds = bytearray()
    digests: list[bytes] = []
    tokens: list[bytes] = []
    for change in news.changes:
        if isinstance(change, CachedBlock):
            kinds.append(_CHILD if change.parent else _FIRST)
            digests.append(change.digest)
            if change.parent:
                digests.append(change.parent)
            tokens.append(change.tokens)
        else:
            kinds.append(_LOST)
            digests.append(change)
    if any(len(digest) != _DIGEST_BYTES for digest in digests):
        raise LinkError(f"a digest has {_DIGEST_BYTES} bytes")
    out.blob(bytes(kinds))
    out.blob(b"".join(digests))
    out.u32(len(tokens[0]) if tokens else 0)
    out.blob(b"".join(tokens))


def read_follow(data: Reader) -> Follow:
    """The wish again."""
    return Follow(ticket=data.u32(), salt=data.blob())


def read_cache_news(data: Reader) -> CacheNews:
    """The news again. Raises LinkError where the columns do not fit each other."""
    ticket = data.u32()
    part = None
    if data.u8():
        part = SnapshotPart(index=data.u32(), num_parts=data.u32(), num_blocks=data.u32())
    kinds, digests = data.blob(), data.blob()
    width, tokens = data.u32(), data.blob()
    num_stored = len(kinds) - kinds.count(_LOST)
    num_digests = len(kinds) + kinds.count(_CHILD)
    if max(kinds, default=0) > _CHILD:
        raise LinkError("a change of a kind that there is not")
    if len(digests) != num_digests * _DIGEST_BYTES or len(tokens) != num_stored * width:
        raise LinkError("the columns of cache news do not fit each other")
    return CacheNews(ticket=ticket, changes=_changes(kinds, digests, tokens, width), part=part)


def _changes(kinds: bytes, digests: bytes, tokens: bytes, width: int) -> tuple[CacheChange, ...]:
    changes: list[CacheChange] = []
    at = token_at = 0
    for kind in kinds:
        digest = digests[at : at + _DIGEST_BYTES]
        at += _DIGEST_BYTES
        if kind == _LOST:
            changes.append(digest)
            continue
        parent = b""
        if kind == _CHILD:
            parent = digests[at : at + _DIGEST_BYTES]
            at += _DIGEST_BYTES
        block = CachedBlock(
            digest=digest, parent=parent, tokens=tokens[token_at : token_at + width]
        )
        token_at += width
        changes.append(block)
    return tuple(changes)
