"""The index of named KV cache blocks, for subscribers that track where a prefix is cached.

Owns the tokens and the chain position of every named block, and the changes since a subscriber's
watch began. Does not know why a block gets or loses its name, nor which subscribers there are. An
engine without subscribers has no index and no cost.

A watch covers one salt: blocks hashed from another salt belong to another tenant, and are never
reported.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

_TOKEN_BYTES = 4


class CachedBlock(NamedTuple):
    """A full block by its `digest`; `parent`: the digest before it in its chain, empty for the
    first; `tokens`: its token ids, int32 in memory order.
    """

    digest: bytes
    parent: bytes
    tokens: bytes


CacheChange: TypeAlias = CachedBlock | bytes
"""A block that was named, or the digest of one that lost its name."""
_Content: TypeAlias = tuple[bytes, bytes]
"""Parent and tokens. There are many: the garbage collector does not track tuples of bytes."""


class CacheWatch:
    """A watch of a salt's blocks: a snapshot, then changes.

    `num_blocks`: blocks in the snapshot. The watch keeps up to `max_num_changes` unread changes;
    beyond that `is_overrun` is set and the watch must be replaced.
    """

    def __init__(self, salt: bytes, blocks: Mapping[bytes, _Content], max_num_changes: int) -> None:
        self.salt = salt
        self.num_blocks = len(blocks)
        self.is_overrun = False
        self._snapshot = _parents_first(dict(blocks))
        self._changes: list[CacheChange] = []
        self._max_num_changes = max_num_changes

    def take_blocks(self, max_num: int) -> list[CachedBlock]:
        """Return the next blocks of the snapshot, parents before children."""
        return list(islice(self._snapshot, max_num))

    def take_changes(self) -> list[CacheChange]:
        """Return the changes since the last call, in order; the first call returns those since the
        snapshot.
        """
        changes, self._changes = self._changes, []
        return changes

    def add(self, changes: Iterable[CacheChange]) -> None:
        """Record changes."""
        if self.is_overrun:
            return
        self._changes.extend(changes)
        if len(self._changes) > self._max_num_changes:
            self.is_overrun = True
            self._changes.clear()


class _Chain:
    """The blocks of one salt, by digest in naming order, and its watches."""

    __slots__ = ("blocks", "salt", "watches")

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.blocks: dict[bytes, _Content] = {}
        self.watches: list[CacheWatch] = []


class CacheIndex:
    """An index of every named block of one pool. `block_size`: in tokens."""

    def __init__(self, block_size: int, max_num_changes: int = 65_536) -> None:
        self._block_bytes = block_size * _TOKEN_BYTES
        self._max_num_changes = max_num_changes
        self._chains: dict[bytes, _Chain] = {}
        self._chain_of: dict[bytes, _Chain] = {}

    @property
    def num_blocks(self) -> int:
        """Number of indexed blocks."""
        return len(self._chain_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._chain_of

    def note_named(
        self, salt: bytes, digests: Sequence[bytes], places: range, tokens: bytes
    ) -> None:
        """Register the blocks at `places` of the chain `digests`, with their `tokens`.

        Earlier blocks of the chain are registered already.
        """
        chain = self._chains.get(salt)
        if chain is None:
            chain = self._chains[salt] = _Chain(salt)
        width = self._block_bytes
        named: list[CachedBlock] = []
        for start, place in zip(range(0, len(tokens), width), places, strict=True):
            digest = digests[place]
            if digest in self._chain_of:
                continue
            parent, own = digests[place - 1] if place else b"", tokens[start : start + width]
            self._chain_of[digest] = chain
            chain.blocks[digest] = (parent, own)
            if chain.watches:
                named.append(CachedBlock(digest=digest, parent=parent, tokens=own))
        for watch in chain.watches:
            watch.add(named)
        self._drop_if_unused(chain)

    def note_lost(self, digests: Iterable[bytes]) -> None:
        """Remove registered blocks that have lost their digests."""
        for digest in digests:
            chain = self._chain_of.pop(digest)
            del chain.blocks[digest]
            for watch in chain.watches:
                watch.add((digest,))
            self._drop_if_unused(chain)

    def watch(self, salt: bytes) -> CacheWatch:
        """Start to watch the blocks hashed from `salt`, until `unwatch`."""
        chain = self._chains.get(salt)
        if chain is None:
            chain = self._chains[salt] = _Chain(salt)
        watch = CacheWatch(salt, chain.blocks, self._max_num_changes)
        chain.watches.append(watch)
        return watch

    def unwatch(self, watch: CacheWatch) -> None:
        """End a watch."""
        chain = self._chains[watch.salt]
        chain.watches.remove(watch)
        self._drop_if_unused(chain)

    def _drop_if_unused(self, chain: _Chain) -> None:
        """Drop an empty chain: many salts are used by a single request."""
        if not chain.blocks and not chain.watches:
            self._chains.pop(chain.salt, None)


def _parents_first(blocks: dict[bytes, _Content]) -> Iterator[CachedBlock]:
    """Yield all of `blocks`, and empty it. A parent may have been named again after its child."""
    for first in list(blocks):
        line: list[CachedBlock] = []
        digest = first
        while (content := blocks.pop(digest, None)) is not None:
            parent, tokens = content
            line.append(CachedBlock(digest=digest, parent=parent, tokens=tokens))
            digest = parent
        yield from reversed(line)
