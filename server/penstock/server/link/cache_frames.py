"""The frames by which a front subscribes to the engine's cached blocks."""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.scheduler.cache_book import CacheChange
from penstock.server.link.wire import TaggedFrame


class Follow(TaggedFrame, frozen=True, kw_only=True):
    """Subscribe to the cached blocks hashed from `salt`. `ticket`: 32 bits."""

    ticket: int
    salt: bytes


class Unfollow(TaggedFrame, frozen=True, kw_only=True):
    """End the subscription with this ticket."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """A part of a snapshot: `index` from 0, of `num_parts` with `num_blocks` in all of them."""

    index: int
    num_parts: int
    num_blocks: int


class CacheUpdate(TaggedFrame, frozen=True, kw_only=True):
    """Changes since the last update of this ticket, in order.

    With `part`: the cached blocks instead of changes; part 0 voids all earlier updates.
    """

    ticket: int
    changes: tuple[CacheChange, ...]
    part: SnapshotPart | None = None


CacheFrame: TypeAlias = Follow | Unfollow | CacheUpdate
