"""What the named blocks of the KV cache hold, for those who want to know where a prefix is cached.

Owns the tokens and the place in its chain of every named block, and the news of blocks that are
named and forgotten since somebody began to watch. Does not know why a block gets its name or loses
it, nor who watches. An engine that nobody may watch keeps no book, and pays nothing for it.

A watch is of one salt: blocks hashed from another are another tenant's, and are never told.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

_TOKEN_BYTES = 4


class CachedBlock(NamedTuple):
    """A full block by its `digest`; `parent`: the digest before it in its chain, empty for the
    first; `tokens`: its token ids, int32 as they lie in memory.
    """

    digest: bytes
    parent: bytes
    tokens: bytes


CacheChange: TypeAlias = CachedBlock | bytes
"""A block that was named, or the digest of one that is forgotten."""
_Content: TypeAlias = tuple[bytes, bytes]
"""Parent and tokens. There are many of them: a plain tuple of bytes costs the collector nothing."""


class CacheWatch:
    """One look at the blocks of a salt: those there were when it began, then what changes.

    `num_blocks`: how many there were. Of changes that nobody takes it keeps `max_num_changes`:
    then `is_overrun`, and it is of no use any more.
    """

    def __init__(self, salt: bytes, blocks: Mapping[bytes, _Content], max_num_changes: int) -> None:
        self.salt = salt
        self.num_blocks = len(blocks)
        self.is_overrun = False
        self._snapshot = _parents_first(dict(blocks))
        self._changes: list[CacheChange] = []
        self._max_num_changes = max_num_changes

    def take_blocks(self, max_num: int) -> list[CachedBlock]:
        """The next of those there were at the beginning, parents before children."""
        return list(islice(self._snapshot, max_num))

    def take_changes(self) -> list[CacheChange]:
        """What has changed since the last call, in that order, from the beginning on."""
        changes, self._changes = self._changes, []
        return changes

    def add(self, changes: Iterable[CacheChange]) -> None:
        """The book has news."""
        if self.is_overrun:
            return
        self._changes.extend(changes)
        if len(self._changes) > self._max_num_changes:
            self.is_overrun = True
            self._changes.clear()


class _Chain:
    """The blocks of one salt, by digest in the order of their naming, and who watches them."""

    __slots__ = ("blocks", "salt", "watches")

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.blocks: dict[bytes, _Content] = {}
        self.watches: list[CacheWatch] = []


class CacheBook:
    """Every named block of one pool. `block_size`: in tokens."""

    def __init__(self, block_size: int, max_num_changes: int = 65_536) -> None:
        self._block_bytes = block_size * _TOKEN_BYTES
        self._max_num_changes = max_num_changes
        self._chains: dict[bytes, _Chain] = {}
        self._chain_of: dict[bytes, _Chain] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return len(self._chain_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._chain_of

    def note_named(
        self, salt: bytes, digests: Sequence[bytes], places: range, tokens: bytes
    ) -> None:
        """The blocks at `places` of the chain `digests` have their names; `tokens`: theirs alone.

        Those that had them before are known already.
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
        """These names are forgotten, each of them known here."""
        for digest in digests:
            chain = self._chain_of.pop(digest)
            del chain.blocks[digest]
            for watch in chain.watches:
                watch.add((digest,))
            self._drop_if_unused(chain)

    def watch(self, salt: bytes) -> CacheWatch:
        """Begin to watch the blocks hashed from `salt`; end it by `unwatch`."""
        chain = self._chains.get(salt)
        if chain is None:
            chain = self._chains[salt] = _Chain(salt)
        watch = CacheWatch(salt, chain.blocks, self._max_num_changes)
        chain.watches.append(watch)
        return watch

    def unwatch(self, watch: CacheWatch) -> None:
        """Nobody takes the news of this one any more."""
        chain = self._chains[watch.salt]
        chain.watches.remove(watch)
        self._drop_if_unused(chain)

    def _drop_if_unused(self, chain: _Chain) -> None:
        """Salts come and go: some are of a single request."""
        if not chain.blocks and not chain.watches:
            self._chains.pop(chain.salt, None)


def _parents_first(blocks: dict[bytes, _Content]) -> Iterator[CachedBlock]:
    """All of `blocks`, which is used up. A parent may have been named again after its child."""
    for first in list(blocks):
        line: list[CachedBlock] = []
        digest = first
        while (content := blocks.pop(digest, None)) is not None:
            parent, tokens = content
            line.append(CachedBlock(digest=digest, parent=parent, tokens=tokens))
            digest = parent
        yield from reversed(line)
