"""Fronts subscribe to the cached blocks of an engine. They receive them in parts and in order, also
after an overrun or the loss of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.cache_index import CachedBlock, CacheIndex
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.ipc.cache_feeds import (
    BLOCKS_PER_PART,
    MAX_FEEDS_PER_FRONT,
    CacheFeeds,
    CacheSubscriber,
)
from penstock.server.ipc.frames import (
    CacheUpdate,
    EngineHello,
    Follow,
    SnapshotPart,
    Unfollow,
    decode,
)
from penstock.server.ipc.ports import EngineUnavailable
from penstock.server.ipc.wire import FrameBuffer, FrameError
from support.link import KEPT_LIMITS, hello, simulated_engine

BLOCK = 4
SALT = b"salt"
FOLLOW = Follow(ticket=7, salt=SALT)


def named(cache_index: CacheIndex, num_blocks: int, start: int = 0) -> tuple[bytes, ...]:
    """Register a chain of `num_blocks` as cached, from block `start` on; return the digests of the
    whole chain.
    """
    tokens = np.arange(num_blocks * BLOCK, dtype=np.int32)
    digests = hash_blocks(tokens, BLOCK, chain_root(SALT))
    data = tokens[start * BLOCK :].tobytes()
    cache_index.note_registered(SALT, digests, range(start, num_blocks), data)
    return digests


def stored(updates: Iterable[CacheUpdate]) -> list[bytes]:
    return [
        change.digest
        for one in updates
        for change in one.changes
        if isinstance(change, CachedBlock)
    ]


def test_a_snapshot_is_sent_in_parts_and_changes_follow() -> None:
    cache_index = CacheIndex(BLOCK)
    num_blocks = 5 * BLOCKS_PER_PART + 1
    digests = named(cache_index, num_blocks)
    feeds = CacheFeeds(cache_index)
    feeds.follow(1, FOLLOW)
    cache_index.note_unregistered(digests[-1:])

    turns: list[list[CacheUpdate]] = []
    while feeds.has_work:
        turns.append([updates for front_id, updates in feeds.take() if front_id == 1])

    assert [len(turn) for turn in turns] == [4, 3]  # four parts a turn
    *parts, last = [updates for turn in turns for updates in turn]
    assert [updates.part for updates in parts] == [
        SnapshotPart(index=index, num_parts=6, num_blocks=num_blocks) for index in range(6)
    ]
    assert stored(parts) == list(digests)
    assert (last.part, last.changes, last.ticket) == (None, digests[-1:], 7)
    assert feeds.take() == []


def test_an_empty_cache_is_reported_too() -> None:
    feeds = CacheFeeds(CacheIndex(BLOCK))
    feeds.follow(1, FOLLOW)

    assert [updates.part for _, updates in feeds.take()] == [
        SnapshotPart(index=0, num_parts=1, num_blocks=0)
    ]
    assert not feeds.has_work


def test_many_changes_make_several_frames() -> None:
    cache_index = CacheIndex(BLOCK)
    feeds = CacheFeeds(cache_index)
    feeds.follow(1, FOLLOW)
    feeds.take()

    digests = named(cache_index, 2 * BLOCKS_PER_PART + 3)

    updates = [one for _, one in feeds.take()]
    assert [len(one.changes) for one in updates] == [BLOCKS_PER_PART, BLOCKS_PER_PART, 3]
    assert stored(updates) == list(digests)


def test_an_overrun_subscriber_begins_again() -> None:
    cache_index = CacheIndex(BLOCK, max_num_changes=2)
    feeds = CacheFeeds(cache_index)
    feeds.follow(1, FOLLOW)
    feeds.take()

    digests = named(cache_index, 3)

    (updates,) = [one for _, one in feeds.take()]
    assert updates.part == SnapshotPart(index=0, num_parts=1, num_blocks=3)
    assert stored([updates]) == list(digests)
    cache_index.note_unregistered(digests[2:])
    assert [one.changes for _, one in feeds.take()] == [digests[2:]]


def test_a_front_that_unsubscribes_or_disconnects_receives_no_more() -> None:
    cache_index = CacheIndex(BLOCK)
    feeds = CacheFeeds(cache_index)
    for front_id in (1, 2, 3):
        feeds.follow(front_id, FOLLOW)
    feeds.take()

    feeds.unfollow(1, 7)
    feeds.unfollow(1, 7)
    feeds.front_disconnected(2)
    named(cache_index, 1)

    assert [front_id for front_id, _ in feeds.take()] == [3]


def test_invalid_frames_of_a_front_are_rejected() -> None:
    with pytest.raises(FrameError, match="not published"):
        CacheFeeds(None).follow(1, FOLLOW)
    feeds = CacheFeeds(CacheIndex(BLOCK))
    feeds.follow(1, FOLLOW)
    with pytest.raises(FrameError, match="twice"):
        feeds.follow(1, FOLLOW)
    for ticket in range(100, 99 + MAX_FEEDS_PER_FRONT):
        feeds.follow(1, Follow(ticket=ticket, salt=SALT))
    with pytest.raises(FrameError, match="at most"):
        feeds.follow(1, Follow(ticket=1, salt=SALT))


def test_the_dispatcher_reports_only_to_subscribers_and_until_unsubscribed() -> None:
    cache_index = CacheIndex(BLOCK)
    digests = named(cache_index, 5 * BLOCKS_PER_PART)
    dispatcher = Dispatcher(
        simulated_engine(), hello(), kept_limits=KEPT_LIMITS, cache_index=cache_index
    )
    for front_id in (1, 2):
        dispatcher.front_connected(front_id)

    assert dispatcher.handle_frame(1, FOLLOW) is None
    frames: list[tuple[int, bytes]] = []
    while dispatcher.has_pending_work:
        frames += dispatcher.step()

    assert {front_id for front_id, _ in frames} == {1}
    reported = [decode(one) for _, frame in frames for one in FrameBuffer().feed(frame)]
    assert stored(one for one in reported if isinstance(one, CacheUpdate)) == list(digests)
    dispatcher.handle_frame(1, Unfollow(ticket=7))
    cache_index.note_unregistered(digests)
    assert dispatcher.step() == []


class SentFrames:
    """Records sent frames. If `is_cut` is set, sending raises EngineUnavailable."""

    def __init__(self) -> None:
        self.sent: list[Follow | Unfollow] = []
        self.is_cut = False

    def write(self, frame: Follow | Unfollow) -> None:
        if self.is_cut:
            raise EngineUnavailable("cut")
        self.sent.append(frame)


def engine(*, publishes_cache: bool) -> EngineHello:
    return msgspec.structs.replace(hello(), publishes_cache=publishes_cache)


def test_cache_feeds_subscribe_to_every_new_engine_and_report_losses() -> None:
    line, received = SentFrames(), list[CacheUpdate | None]()
    subscriber = CacheSubscriber(line.write)
    stop = subscriber.follow(SALT, received.append)
    assert line.sent == []  # no engine yet

    subscriber.on_hello(engine(publishes_cache=True))
    assert line.sent == [Follow(ticket=0, salt=SALT)]
    updates = CacheUpdate(ticket=0, changes=())
    subscriber.on_update(updates)
    subscriber.on_update(CacheUpdate(ticket=9, changes=()))
    subscriber.on_lost()
    subscriber.on_lost()
    assert received == [updates, None]

    subscriber.on_hello(engine(publishes_cache=False))
    assert len(line.sent) == 1
    subscriber.on_lost()
    assert received == [updates, None]

    subscriber.on_hello(engine(publishes_cache=True))
    line.is_cut = True
    stop()
    line.is_cut = False
    stop()
    subscriber.on_update(updates)
    assert (line.sent, received) == ([Follow(ticket=0, salt=SALT)] * 2, [updates, None])


def test_unsubscribing_sends_an_unfollow_frame() -> None:
    line = SentFrames()
    subscriber = CacheSubscriber(line.write)
    subscriber.on_hello(engine(publishes_cache=True))

    stop = subscriber.follow(SALT, lambda _: None)
    stop()

    assert line.sent == [Follow(ticket=0, salt=SALT), Unfollow(ticket=0)]
