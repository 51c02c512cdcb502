"""Cache events in a gateway's contract: batches, numbered within a stream.

Owns the foreign messages for it and their numbers. A gateway takes the hash of a block for a name
and nothing else, so the first eight bytes of ours serve.
"""

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from penstock.scheduler.cache_book import CacheChange, CachedBlock
from penstock.server.link.frames import CacheUpdate

_HASH_BYTES: Final = 8


class KvBatches:
    """The batches of one stream. `wall_clock`: seconds since 1970."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._num_batches = 0
        self._num_events = 0

    def cleared(self) -> common.KvEventBatch:
        """All blocks are lost: the engine has ended."""
        batch = self._next_batch()
        self._next_event(batch).cleared.SetInParent()
        return batch

    def batch_of(self, news: CacheUpdate) -> common.KvEventBatch:
        """One batch. A snapshot's first part begins by clearing the earlier state."""
        batch = self._next_batch()
        part = news.part
        if part is not None:
            batch.snapshot.SetInParent()
            batch.snapshot.index = part.index
            batch.snapshot.count = part.num_parts
            batch.snapshot.blocks = part.num_blocks
            if part.index == 0:
                batch.events.add().cleared.SetInParent()
        self._add_changes(batch, news.changes)
        return batch

    def _add_changes(self, batch: common.KvEventBatch, changes: Iterable[CacheChange]) -> None:
        stored: common.KvBlocksStored | None = None
        removed: common.KvBlocksRemoved | None = None
        previous = b""
        for change in changes:
            if isinstance(change, CachedBlock):
                removed = None
                if stored is None or change.parent != previous:
                    stored = self._next_event(batch).stored
                    stored.tier = common.KV_CACHE_TIER_DEVICE
                    if change.parent:
                        stored.parent_block_hash = _hash_of(change.parent)
                ids: list[int] = np.frombuffer(change.tokens, dtype=np.int32).tolist()
                stored.blocks.add(
                    block_hash=_hash_of(change.digest), token_ids=ids, block_size=len(ids)
                )
                previous = change.digest
            else:
                stored = None
                if removed is None:
                    removed = self._next_event(batch).removed
                    removed.tier = common.KV_CACHE_TIER_DEVICE
                removed.block_hashes.append(_hash_of(change))

    def _next_batch(self) -> common.KvEventBatch:
        self._num_batches += 1
        return common.KvEventBatch(sequence_number=self._num_batches, timestamp=self._wall_clock())

    def _next_event(self, batch: common.KvEventBatch) -> common.KvCacheEvent:
        """The next event id; events of a snapshot have none."""
        if batch.HasField("snapshot"):
            return batch.events.add()
        self._num_events += 1
        return batch.events.add(event_id=self._num_events)


def _hash_of(digest: bytes) -> int:
    return int.from_bytes(digest[:_HASH_BYTES], "little", signed=True)
