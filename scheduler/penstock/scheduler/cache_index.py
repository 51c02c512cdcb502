"""Indexes hashed KV cache blocks, for subscribers that track which prefixes are cached.

Records the tokens and the chain position of every block with a digest, and the changes since a
subscriber's watch began. An engine has no index, and no cost, unless `Engine.enable_cache_index` is
called.

A watch covers one salt (the start of a hash chain, see block_hash.py): blocks hashed from another
salt may belong to another tenant, and are not reported.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

_TOKEN_BYTES = 4


class CachedBlock(NamedTuple):
    """A full block as reported to subscribers.

    `digest`: its content hash. `parent`: the previous digest in the chain, empty for the first
    block. `tokens`: its token ids, as bytes of int32.
    """

    digest: bytes
    parent: bytes
    tokens: bytes


CacheChange: TypeAlias = CachedBlock | bytes
"""A change: a newly hashed block, or the digest of a removed block."""
_Content: TypeAlias = tuple[bytes, bytes]
"""Parent digest and tokens of a block.

A tuple of bytes, because there are many blocks and the garbage collector does not track such a
tuple.
"""


class CacheWatch:
    """A subscription to the blocks of one salt: a snapshot, then changes.

    `num_blocks`: number of blocks in the snapshot. The watch keeps up to `max_num_changes` unread
    changes; beyond that `is_overrun` is set and the subscriber must start a new watch.
    """

    def __init__(self, salt: bytes, blocks: Mapping[bytes, _Content], max_num_changes: int) -> None:
        self.salt = salt
        self.num_blocks = len(blocks)
        self.is_overrun = False
        self._snapshot = _parents_first(dict(blocks))
        self._changes: list[CacheChange] = []
        self._max_num_changes = max_num_changes

    def take_blocks(self, max_num: int) -> list[CachedBlock]:
        """Return up to `max_num` more blocks of the snapshot, parents before children; empty once
        all blocks were returned.
        """
        return list(islice(self._snapshot, max_num))

    def take_changes(self) -> list[CacheChange]:
        """Return the changes since the last call, in order; the first call returns the changes
        since the watch began. Empty after an overrun.
        """
        changes, self._changes = self._changes, []
        return changes

    def add(self, changes: Iterable[CacheChange]) -> None:
        """Append changes. If there are too many unread ones, discard them all and set `is_overrun`;
        after that, a no-op.
        """
        if self.is_overrun:
            return
        self._changes.extend(changes)
        if len(self._changes) > self._max_num_changes:
            self.is_overrun = True
            self._changes.clear()


class _Chain:
    """The blocks of one salt, by digest in order of registration, and the watches of that salt."""

    __slots__ = ("blocks", "salt", "watches")

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.blocks: dict[bytes, _Content] = {}
        self.watches: list[CacheWatch] = []


class CacheIndex:
    """An index of every hashed block of one pool. `block_size`: in tokens. `max_num_changes`: see
    `CacheWatch`.
    """

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

    def note_registered(
        self, salt: bytes, digests: Sequence[bytes], positions: range, tokens: bytes
    ) -> None:
        """Register the blocks at the positions `positions` of the chain `digests`, except blocks
        that are already registered. `tokens`: the token ids at all `positions`, as bytes of int32.

        The earlier blocks of the chain must be registered already.
        """
        chain = self._chains.get(salt)
        if chain is None:
            chain = self._chains[salt] = _Chain(salt)
        width = self._block_bytes
        registered: list[CachedBlock] = []
        for start, position in zip(range(0, len(tokens), width), positions, strict=True):
            digest = digests[position]
            if digest in self._chain_of:
                continue
            parent, own = digests[position - 1] if position else b"", tokens[start : start + width]
            self._chain_of[digest] = chain
            chain.blocks[digest] = (parent, own)
            if chain.watches:
                registered.append(CachedBlock(digest=digest, parent=parent, tokens=own))
        for watch in chain.watches:
            watch.add(registered)
        self._drop_if_unused(chain)

    def note_unregistered(self, digests: Iterable[bytes]) -> None:
        """Remove the blocks with these digests, all of which must be registered."""
        for digest in digests:
            chain = self._chain_of.pop(digest)
            del chain.blocks[digest]
            for watch in chain.watches:
                watch.add((digest,))
            self._drop_if_unused(chain)

    def watch(self, salt: bytes) -> CacheWatch:
        """Start a watch of the blocks hashed from `salt`; `unwatch` ends it."""
        chain = self._chains.get(salt)
        if chain is None:
            chain = self._chains[salt] = _Chain(salt)
        watch = CacheWatch(salt, chain.blocks, self._max_num_changes)
        chain.watches.append(watch)
        return watch

    def unwatch(self, watch: CacheWatch) -> None:
        """End a watch, so that it receives no more changes."""
        chain = self._chains[watch.salt]
        chain.watches.remove(watch)
        self._drop_if_unused(chain)

    def _drop_if_unused(self, chain: _Chain) -> None:
        """Drop a chain without blocks or watches: many salts are used by only one request."""
        if not chain.blocks and not chain.watches:
            self._chains.pop(chain.salt, None)


def _parents_first(blocks: dict[bytes, _Content]) -> Iterator[CachedBlock]:
    """Yield and remove all of `blocks`, parents first.

    The dict order is not enough, because a parent may have been registered again after its child.
    """
    for first in list(blocks):
        chain_blocks: list[CachedBlock] = []
        digest = first
        while (content := blocks.pop(digest, None)) is not None:
            parent, tokens = content
            chain_blocks.append(CachedBlock(digest=digest, parent=parent, tokens=tokens))
            digest = parent
        yield from reversed(chain_blocks)
