"""Serves streams of KV cache events, with which a gateway routes a request to a worker that has
cached the request's prefix.

Checks the right to subscribe, chooses the blocks of each stream, and disconnects a subscriber that
does not read. A stream contains only the blocks that requests of its caller may share, because
blocks reveal the tokens of prompts.

Also builds the gateway's messages for cached blocks: batches of events, numbered within a stream.
The gateway uses the hash of a block only as an identifier, so the first eight bytes of the hash are
sufficient.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from penstock.scheduler.cache_index import CacheChange, CachedBlock
from penstock.server.front.errors import (
    ErrorReason,
    RequestError,
    request_error,
    unsupported_feature,
)
from penstock.server.front.event_router import STALLED
from penstock.server.front.front import Front
from penstock.server.front.submission import shared_salt
from penstock.server.front.watched_write import SharedWriter
from penstock.server.ipc.frames import CacheUpdate
from penstock.server.rpc.access_control import AccessControl, require
from penstock.server.rpc.handlers import Context
from penstock.server.rpc.parsing import parse
from penstock.server.security.rights import Caller, Right

MAX_STREAMS: Final = 16
"""Maximum number of streams of a front (gRPC server process). A gateway has one per worker. For
each stream the engine sends a copy of the events."""
_MIN_BACKLOG: Final = 65_536
logger = logging.getLogger(__name__)


_HASH_BYTES: Final = 8


class KvBatches:
    """Builds the event batches of one stream and numbers them from 1. `wall_clock` returns seconds
    since 1970."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._num_batches = 0
        self._num_events = 0

    def cleared(self) -> common.KvEventBatch:
        """Return the batch that reports that all blocks are lost, because the engine has ended."""
        batch = self._next_batch()
        self._next_event(batch).cleared.SetInParent()
        return batch

    def batch_of(self, update: CacheUpdate) -> common.KvEventBatch:
        """Return the batch for one cache update. The first part of a snapshot begins with an event
        that clears the earlier state."""
        batch = self._next_batch()
        part = update.part
        if part is not None:
            batch.snapshot.SetInParent()
            batch.snapshot.index = part.index
            batch.snapshot.count = part.num_parts
            batch.snapshot.blocks = part.num_blocks
            if part.index == 0:
                batch.events.add().cleared.SetInParent()
        self._add_changes(batch, update.changes)
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
        """Add an event with the next id and return it. Events of a snapshot have no id."""
        if batch.HasField("snapshot"):
            return batch.events.add()
        self._num_events += 1
        return batch.events.add(event_id=self._num_events)


def _hash_of(digest: bytes) -> int:
    return int.from_bytes(digest[:_HASH_BYTES], "little", signed=True)


class KvEvents:
    """The cache event streams of one front process. `wall_clock` returns seconds since 1970."""

    def __init__(
        self, front: Front, access: AccessControl, wall_clock: Callable[[], float]
    ) -> None:
        self._front = front
        self._access = access
        self._wall_clock = wall_clock
        self._num_streams = 0

    async def subscribe(self, data: bytes, context: Context, caller: Caller) -> None:
        """Send the cached blocks, and then all changes, until the stream or the service ends.

        Raises RequestError:

        - FEATURE_UNSUPPORTED if the engine publishes no cache events
        - QUEUE_FULL if too many streams are open
        - SEQUENCE_UNAVAILABLE if the request names a sequence number to start at: the events of
          earlier streams are not kept
        - READER_STALLED if the gateway reads too slowly
        - DRAINING when the server drains
        - other reasons if the caller lacks the right, or while the engine accepts no requests
        """
        front, port, tenant = self._front, self._front.port, caller.tenant
        shares = front.config.shares_prefixes_across_tenants
        # Blocks that are shared across tenants reveal tokens of all tenants, so they are only for
        # operators.
        right = Right.OPERATIONS_READ if shares else Right.GENERATE
        require(right, caller, context)
        message = parse(common.SubscribeKvEventsRequest, data)
        front.current_limits()
        hello = front.hello
        if hello is None:
            raise request_error(ErrorReason.ENGINE_DOWN)
        is_known = hello.publishes_cache and front.config.is_prefix_caching
        if port is None or not is_known:
            raise unsupported_feature("kv_events")
        if message.start_sequence_number:
            raise request_error(
                ErrorReason.SEQUENCE_UNAVAILABLE, first_sequence="0", next_sequence="0"
            )
        if self._num_streams >= MAX_STREAMS:
            raise request_error(
                ErrorReason.QUEUE_FULL, "the maximum number of cache streams is open"
            )
        stream = _Subscription(
            front, KvBatches(self._wall_clock), max_backlog=2 * hello.executor.num_blocks
        )
        front.shared_writers.add(stream.ready)
        self._num_streams += 1
        stop = port.follow_cache(shared_salt("" if shares else tenant), stream.receive)
        try:
            # Send the headers immediately: a gateway drops a worker that does not respond for two
            # seconds.
            await context.send_initial_metadata(())
            await stream.run(context, lambda: self._access.authorize_again(context, right, tenant))
        finally:
            stop()
            self._num_streams -= 1
            front.shared_writers.discard(stream.ready)


class _Subscription:
    """The events of one subscriber. The maximum number of unread changes is `max_backlog`, but at
    least `_MIN_BACKLOG`."""

    def __init__(self, front: Front, batches: KvBatches, max_backlog: int) -> None:
        self.ready: SharedWriter[CacheUpdate | None] = SharedWriter()
        self._front = front
        self._batches = batches
        self._max_backlog = max(max_backlog, _MIN_BACKLOG)
        self._backlog = 0

    def receive(self, update: CacheUpdate | None) -> None:
        """Queue a cache update to be written; `update` is None if the engine has ended. If the
        gateway reads too slowly, end the stream."""
        if self.ready.is_aborted:
            return
        self._backlog += _size_of(update)
        self.ready.mark(update)
        if self._backlog > self._max_backlog:
            logger.warning("a gateway left %d cache changes unread: disconnecting", self._backlog)
            self._front.counters.num_disconnected_readers += 1
            self.ready.abort(STALLED)

    async def run(self, context: Context, authorize_again: Callable[[], object]) -> None:
        """Write the events until either peer ends the stream. Raises RequestError: DRAINING when
        the server drains, READER_STALLED, or the rejection of a credential that was revoked."""
        ready, clock = self.ready, self._front.clock
        try:
            while not self._front.is_draining:
                some = await ready.take()
                # The credential may have been revoked meanwhile.
                authorize_again()
                for update in some:
                    self._backlog -= _size_of(update)
                    batch = (
                        self._batches.cleared()
                        if update is None
                        else self._batches.batch_of(update)
                    )
                    ready.begin_write(clock())
                    await context.write(batch.SerializeToString())
                    ready.end_write(clock())
        except asyncio.CancelledError:
            # The peer has disconnected, or it did not read and the stream was closed during the
            # write.
            if ready.was_interrupted() and ready.failure is not None:
                raise RequestError(ready.failure) from None
            raise
        raise request_error(ErrorReason.DRAINING)


def _size_of(update: CacheUpdate | None) -> int:
    return 1 if update is None else 1 + len(update.changes)
