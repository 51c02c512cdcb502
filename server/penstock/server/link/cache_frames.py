"""The frames by which a front hears what is cached: the wish for it, and the news.

Owns the frames. Does not know who keeps the book of it.
"""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.scheduler.cache_book import CacheChange
from penstock.server.link.wire import TaggedFrame


class Follow(TaggedFrame, frozen=True, kw_only=True):
    """Tell what is cached of what is hashed from `salt`, and go on telling. `ticket`: 32 bits."""

    ticket: int
    salt: bytes


class Unfollow(TaggedFrame, frozen=True, kw_only=True):
    """Tell no more under this ticket."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """Which part of a snapshot: `index` from 0, of `num_parts` with `num_blocks` in all of them."""

    index: int
    num_parts: int
    num_blocks: int


class CacheUpdate(TaggedFrame, frozen=True, kw_only=True):
    """What has changed since the last news of this ticket, in that order.

    With `part`: no changes but what there is; whatever was told before part 0 is void.
    """

    ticket: int
    changes: tuple[CacheChange, ...]
    part: SnapshotPart | None = None


CacheFrame: TypeAlias = Follow | Unfollow | CacheUpdate
