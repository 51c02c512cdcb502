"""The block pool compared with a simple model, for any order of operations and times.

The model computes levels, ages and both eviction orders without optimisation; every eviction must
be the model's.
"""

import math
from itertools import groupby
from typing import Protocol

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.scheduler.block_pool import BlockPool
from penstock.scheduler.cached_blocks import RecencyOrder
from penstock.scheduler.hit_density import MAX_RUN, NUM_BINS, HitDensityOrder
from penstock.scheduler.request import CacheRetention
from penstock.scheduler.sessions import SessionKey, Sessions
from support.core import blocks_of

# Eviction orders in their simplest form, compared with the real ones.

EDGES = [0] + [edge << octave for octave in range(24) for edge in (16, 24)]
"""Lower bounds of the age bins: 0, 16, 24, 32, 48, ..."""


class NaiveOrder(Protocol):
    """Interface of a simple eviction order of the cached blocks of the default level. `now`: number
    of blocks released so far.
    """

    def blocks(self) -> set[int]: ...

    def arrive(self, blocks: list[int], first_turn: int) -> None: ...

    def insert(self, block: int, turn: int) -> None: ...

    def take(self, block: int) -> int: ...

    def discard(self, block: int, now: int) -> None: ...

    def victim(self, now: int) -> int: ...

    def name(self, block: int, digest: bytes, now: int) -> None: ...

    def share(self, block: int) -> None: ...

    def lose(self, block: int) -> None: ...


class NaiveLru:
    """Evicts the block released longest ago."""

    def __init__(self) -> None:
        self.turns: dict[int, int] = {}

    def blocks(self) -> set[int]:
        return set(self.turns)

    def arrive(self, blocks: list[int], first_turn: int) -> None:
        self.turns.update({block: first_turn + i for i, block in enumerate(blocks)})

    def insert(self, block: int, turn: int) -> None:
        self.turns[block] = turn

    def take(self, block: int) -> int:
        return self.turns.pop(block)

    def discard(self, block: int, now: int) -> None:
        del self.turns[block]

    def victim(self, now: int) -> int:
        block = min(self.turns, key=self.turns.__getitem__)
        del self.turns[block]
        return block

    def name(self, block: int, digest: bytes, now: int) -> None:
        pass

    def share(self, block: int) -> None:
        pass

    def lose(self, block: int) -> None:
        pass


class NaiveHitDensity:
    """Evicts by the hits expected per time, as `HitDensityOrder` does.

    The class of a block is its number of uses, at most 8. `segments`: (class, number of the release
    of the first block, blocks in order of release); a chain is released from its end. `lives`:
    number of blocks that arrived, by class; `hits`: number of hits by class and age bin.
    """

    def __init__(self, num_blocks: int, refit_every: int, max_run: int) -> None:
        self.num_blocks, self.refit_every, self.max_run = num_blocks, refit_every, max_run
        self.segments: list[tuple[int, int, list[int]]] = []
        self.moved: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.digests: dict[int, bytes] = {}
        self.gone: dict[bytes, tuple[int, int]] = {}
        self.lives = [0] * 9
        self.hits = [[0] * NUM_BINS for _ in range(9)]
        self.worth = [[0.0] * NUM_BINS for _ in range(9)]
        self.num_arrivals = 0
        self.choice: tuple[int, int, list[int]] | None = None
        self.num_left = 0

    def blocks(self) -> set[int]:
        return {block for *_, blocks in self.segments for block in blocks} | self.moved.keys()

    def arrive(self, blocks: list[int], first_turn: int) -> None:
        before = None
        for turn, block in enumerate(blocks, first_turn):
            kind = self.uses.get(block, 1)
            if kind != before:
                self.segments.append((kind, turn, []))
            self.segments[-1][2].append(block)
            self.lives[kind] += 1
            before = kind
        self.num_arrivals += 1
        if self.num_arrivals % self.refit_every == 0:
            self.refit()

    def insert(self, block: int, turn: int) -> None:
        self.moved[block] = turn

    def take(self, block: int) -> int:
        if block in self.moved:
            return self.moved.pop(block)
        segment = next(s for s in self.segments if block in s[2])
        segment[2].remove(block)
        self.segments = [s for s in self.segments if s[2]]
        return segment[1]

    def discard(self, block: int, now: int) -> None:
        for kind, turn, blocks in self.segments:
            if block in blocks:
                self.hits[kind][self.bin(now - turn)] += 1
        self.take(block)

    def victim(self, now: int) -> int:
        if self.choice is None or not self.choice[2] or not self.num_left:
            self.choice, self.num_left = self.choose(now), self.max_run
        if self.choice is None:
            block = min(self.moved, key=lambda block: (self.moved[block], block))
        else:
            block = self.choice[2][0]
            self.num_left -= 1
        turn = self.take(block)
        self.gone[self.digests[block]] = (self.uses.get(block, 1), turn)
        while len(self.gone) > 4 * self.num_blocks:
            del self.gone[next(iter(self.gone))]
        self.lose(block)
        return block

    def choose(self, now: int) -> tuple[int, int, list[int]] | None:
        found: list[tuple[float, int, tuple[int, int, list[int]] | None]] = []
        for kind in range(1, 9):
            of_class = [s for s in self.segments if s[0] == kind]
            found += [
                (self.worth[kind][self.bin(now - s[1])], s[1], s)
                for s in (of_class[:1] + of_class[-1:])
            ]
        if self.moved:
            turn, block = min((turn, block) for block, turn in self.moved.items())
            kind = self.uses.get(block, 1)
            found.append((self.worth[kind][self.bin(now - turn)], turn, None))
        return min(found, key=lambda each: each[:2])[2]

    def bin(self, age: int) -> int:
        return max(i for i in range(NUM_BINS) if EDGES[i] <= age)

    def refit(self) -> None:
        for kind in range(9):
            left = [self.lives[kind]]
            for hits in self.hits[kind]:
                left.append(left[-1] - hits)
            left = [max(0, count) for count in left]
            for start in range(NUM_BINS):
                best, gain, cost = 0.0, 0, 0
                for end in range(start, NUM_BINS):
                    gain += self.hits[kind][end]
                    cost += (left[end] + left[end + 1]) * (EDGES[end + 1] - EDGES[end])
                    best = max(best, gain / cost if cost else 0.0)
                self.worth[kind][start] = max(best, self.worth[kind - 1][start] if kind else 0.0)
        if sum(self.lives) > 64 * self.num_blocks:
            self.lives = [count // 2 for count in self.lives]
            self.hits = [[count // 2 for count in hits] for hits in self.hits]

    def name(self, block: int, digest: bytes, now: int) -> None:
        self.digests[block] = digest
        if digest in self.gone:
            uses, turn = self.gone.pop(digest)
            self.hits[uses][self.bin(now - turn)] += 1
            self.uses[block] = min(8, uses + 1)

    def share(self, block: int) -> None:
        self.uses[block] = min(8, self.uses.get(block, 1) + 1)

    def lose(self, block: int) -> None:
        self.uses.pop(block, None)
        self.digests.pop(block, None)


DEFAULT, SESSION_LEVEL, TTL_S = 35, 60, 10.0
RETENTIONS = st.none() | st.builds(
    CacheRetention,
    level=st.sampled_from([0, 10, 35, 50, 60, 90]),
    duration_s=st.sampled_from([1.0, 7.0, math.inf]),
)
KEYS: list[SessionKey] = [("", name, b"") for name in "abc"]


class LevelModel:
    """The level of every block from its claims and sessions, computed without optimisation."""

    def __init__(self, max_num_blocks: int, max_num_each: int) -> None:
        self.max_num_blocks, self.max_num_each = max_num_blocks, max_num_each
        self.claims: dict[int, tuple[int, float]] = {}
        self.settled: set[int] = set()
        # Used longest ago first.
        self.sessions: list[tuple[SessionKey, int, float, list[int]]] = []

    def level(self, block: int, now: float) -> int:
        level, until_s = self.claims.get(block, (DEFAULT, math.inf))
        if until_s <= now:
            level = DEFAULT
        return max(level, SESSION_LEVEL) if block in self.held() else level

    def held(self) -> set[int]:
        return {block for *_, blocks in self.sessions for block in blocks}

    def leave(
        self, block: int, is_named: bool, retention: CacheRetention | None, now: float
    ) -> None:
        level = DEFAULT if retention is None else retention.level
        if level >= DEFAULT:
            self.settled.add(block)
            if self.claims.get(block, (DEFAULT, 0.0))[0] < DEFAULT:
                del self.claims[block]
        if retention is None or level == DEFAULT or not is_named:
            return
        if level > DEFAULT or block not in self.settled:
            claim = (level, now + retention.duration_s)
            self.claims[block] = max(claim, self.claims.get(block, claim))

    def hold(self, key: SessionKey, turn: int, blocks: list[int], now: float) -> None:
        before = next(((t, b) for k, t, _, b in self.sessions if k == key), (turn, []))
        kept = before[1] if before[0] == turn else []
        wanted = list(dict.fromkeys([*kept, *blocks]))[: self.max_num_each]
        self.sessions = [session for session in self.sessions if session[0] != key]
        if wanted:
            self.sessions.append((key, turn, now + TTL_S, wanted))
        while len(self.held()) > self.max_num_blocks:
            del self.sessions[0]

    def renew(self, key: SessionKey, now: float) -> None:
        for index, (there, turn, _, blocks) in enumerate(self.sessions):
            if there == key:
                del self.sessions[index]
                self.sessions.append((key, turn, now + TTL_S, blocks))
                return

    def expire(self, now: float) -> None:
        self.claims = {block: claim for block, claim in self.claims.items() if claim[1] > now}
        self.sessions = [session for session in self.sessions if session[2] > now]

    def forget(self, block: int) -> None:
        self.claims.pop(block, None)
        sessions = [
            (k, t, s, [b for b in blocks if b != block]) for k, t, s, blocks in self.sessions
        ]
        self.sessions = [session for session in sessions if session[3]]


class BlockPoolMachine(RuleBasedStateMachine):
    """A hypothesis state machine that makes the same calls to the pool and to the model.

    `holders`: block tables; each holds one reference to each of its blocks. `order`: the cached
    blocks of the default level; `elsewhere`: (level, number of its release) of each other cached
    block. Releases of cached blocks are numbered from 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(1)
        self.model = LevelModel(1, 1)
        self.holders: list[list[int]] = []
        self.digests = 0
        self.named: dict[bytes, int] = {}
        self.order: NaiveOrder = NaiveLru()
        self.elsewhere: dict[int, tuple[int, int]] = {}
        self.num_left = 0
        self.turn = 0
        self.now = 0.0

    @initialize(
        num_blocks=st.integers(1, 12),
        most=st.integers(1, 8),
        each=st.integers(1, 6),
        refit_every=st.sampled_from([None, 1, 3]),
    )
    def fresh(self, num_blocks: int, most: int, each: int, refit_every: int | None) -> None:
        each = min(most, each)
        sessions = Sessions(
            level=SESSION_LEVEL, ttl_s=TTL_S, max_num_blocks=most, max_num_each=each
        )
        self.model = LevelModel(most, each)
        if refit_every is None:
            self.pool, self.order = BlockPool(num_blocks, sessions, RecencyOrder()), NaiveLru()
        else:
            order = HitDensityOrder(num_blocks, refit_every=refit_every)
            self.pool = BlockPool(num_blocks, sessions, order)
            self.order = NaiveHitDensity(num_blocks, refit_every, MAX_RUN)

    @rule(count=st.integers(1, 13))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        if count > available:
            try:
                self.pool.allocate(count)
            except ValueError:
                assert self.pool.num_available == available
                return
            raise AssertionError("gave more than it has")
        before = {block for table in self.holders for block in table}
        num_evicted = max(0, count - (available - self.pool.num_cached))
        victims = self.next_victims(num_evicted)
        blocks = self.pool.allocate(count).tolist()
        assert len(set(blocks)) == count
        assert not before & set(blocks), "a used block was handed out"
        assert blocks[count - num_evicted :] == victims, "others should have been given up first"
        # What was evicted must not be found again.
        self.named = {d: b for d, b in self.named.items() if b not in blocks}
        self.holders.append(blocks)

    def cached(self) -> set[int]:
        return self.order.blocks() | self.elsewhere.keys()

    def next_victims(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks to evict: the blocks of the lowest level first,
        each level in its order.
        """
        victims: list[int] = []
        for _ in range(count):
            level = min(self.model.level(block, self.now) for block in self.cached())
            if level == DEFAULT:
                victim = self.order.victim(self.num_left)
            else:
                of_level = [(turn, b) for b, (at, turn) in self.elsewhere.items() if at == level]
                victim = min(of_level)[1]
                del self.elsewhere[victim]
                self.order.lose(victim)
            self.model.forget(victim)
            victims.append(victim)
        return victims

    def move(self) -> None:
        """Update `order` and `elsewhere` for the cached blocks whose level has changed."""
        for block in sorted(self.cached()):
            level = self.model.level(block, self.now)
            was, turn = self.elsewhere.get(block, (DEFAULT, 0))
            if level == was:
                continue
            if was == DEFAULT:
                turn = self.order.take(block)
            if level == DEFAULT:
                del self.elsewhere[block]
                self.order.insert(block, turn)
            else:
                self.elsewhere[block] = (level, turn)

    def use(self, blocks: list[int]) -> None:
        """Add a reference to each of these registered blocks."""
        self.pool.share(blocks)
        for block in blocks:
            self.order.share(block)
            if block in self.order.blocks():
                self.order.discard(block, self.num_left)
            self.elsewhere.pop(block, None)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.holders))
        block = data.draw(st.sampled_from(table))
        self.digests += 1
        digest = self.digests.to_bytes(4, "big")
        self.pool.register(block, digest)
        if block not in self.named.values():
            self.become_known(block, digest)

    def become_known(self, block: int, digest: bytes) -> None:
        self.named[digest] = block
        self.order.name(block, digest, self.num_left)
        self.model.settled.discard(block)

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        digests = data.draw(st.lists(st.sampled_from(sorted(self.named)), unique=True))
        blocks = self.pool.match(digests)
        assert blocks == [self.named[digest] for digest in digests]
        assert self.pool.num_unused(blocks) == len(set(blocks) & self.cached())
        self.use(blocks)
        if blocks:
            self.holders.append(blocks)

    @rule(chain=st.sampled_from("xyz"), length=st.integers(1, 5))
    def come_with_a_chain(self, chain: str, length: int) -> None:
        """Run a request whose prompt is the first `length` blocks of one of three chains, and share
        the blocks that the pool already has.

        Does nothing if the pool has too few blocks, or has a block of the prompt but not all before
        it.
        """
        digests = [f"{chain}{place}".encode() for place in range(length)]
        found = self.pool.match(digests)
        assert found == [self.named[d] for d in digests[: len(found)]]
        is_whole = not self.named.keys() & set(digests[len(found) :])
        unused = self.pool.num_unused(found)
        if not is_whole or length - len(found) > self.pool.num_available - unused:
            return
        self.use(found)
        table = list(found)
        if len(found) < length:
            self.holders.append(found)
            self.allocate(length - len(found))
            table += self.holders.pop()
            self.holders.pop()
        self.pool.register_chain(np.array(table, np.int32), digests, range(len(found), length))
        for block, digest in zip(table[len(found) :], digests[len(found) :], strict=True):
            self.become_known(block, digest)
        self.holders.append(table)
        self.leave(len(self.holders) - 1, None)

    @rule()
    def match_stops_at_the_first_unknown(self) -> None:
        known = sorted(self.named)[:2]
        assert self.pool.match([*known, b"unknown", *known]) == [self.named[d] for d in known]

    @precondition(lambda self: self.pool.num_available)
    @rule(
        retentions=st.lists(RETENTIONS, min_size=1, max_size=3),
        key=st.none() | st.sampled_from(KEYS),
    )
    def come_and_go(self, retentions: list[CacheRetention | None], key: SessionKey | None) -> None:
        """Run one request of one block for each of `retentions`; all requests belong to the session
        `key`, if given.
        """
        for retention in retentions[: self.pool.num_available]:
            self.allocate(1)
            (block,) = self.holders[-1]
            self.digests += 1
            digest = self.digests.to_bytes(4, "big")
            self.pool.register(block, digest)
            self.become_known(block, digest)
            if key is not None:
                self.pool.hold(key, self.turn, [block], self.now)
                self.model.hold(key, self.turn, [block], self.now)
                self.move()
            self.leave(len(self.holders) - 1, retention)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), retention=RETENTIONS)
    def release(self, data: st.DataObject, retention: CacheRetention | None) -> None:
        self.leave(data.draw(st.integers(0, len(self.holders) - 1)), retention)

    def leave(self, index: int, retention: CacheRetention | None) -> None:
        table = self.holders.pop(index)
        self.pool.release(np.array(table, dtype=np.int32), retention, self.now)
        used = {block for held in self.holders for block in held}
        left: list[int] = []
        for block in reversed(table):
            is_named = block in self.named.values()
            self.model.leave(block, is_named, retention, self.now)
            if is_named and block not in used:
                left.append(block)
        for level, run in groupby(left, lambda block: self.model.level(block, self.now)):
            blocks = list(run)
            if level == DEFAULT:
                self.order.arrive(blocks, self.num_left + 1)
            for block in blocks:
                self.num_left += 1
                if level != DEFAULT:
                    self.elsewhere[block] = (level, self.num_left)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.holders))
        self.pool.forget(np.array(table, dtype=np.int32))
        for block in table:
            self.model.forget(block)
            self.order.lose(block)
        self.named = {d: b for d, b in self.named.items() if b not in table}

    @precondition(lambda self: self.named)
    @rule(data=st.data(), key=st.sampled_from(KEYS), is_new=st.booleans())
    def hold(self, data: st.DataObject, key: SessionKey, is_new: bool) -> None:
        known = st.sampled_from(sorted(self.named.values()))
        blocks = data.draw(st.lists(known, min_size=1, unique=True) | st.just([]))
        self.turn += is_new
        self.pool.hold(key, self.turn, blocks, self.now)
        self.model.hold(key, self.turn, blocks, self.now)
        self.move()

    @rule(key=st.sampled_from(KEYS))
    def renew(self, key: SessionKey) -> None:
        self.pool.sessions.renew(key, self.now)
        self.model.renew(key, self.now)

    @rule(seconds=st.sampled_from([0.5, 4.0, 6.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.pool.expire(self.now)
        self.model.expire(self.now)
        self.move()

    @invariant()
    def adds_up(self) -> None:
        assert not any(self.pool.faults())
        references = np.zeros(self.pool.num_blocks, dtype=int)
        for table in self.holders:
            for block in table:
                references[block] += 1
        assert references.tolist() == self.pool.ref_counts.tolist()
        assert self.pool.num_used == int((references > 0).sum())
        assert self.pool.num_available + self.pool.num_used == self.pool.num_blocks

    @invariant()
    def levels_are_as_they_should_be(self) -> None:
        cached = {b: self.pool.level(b) for b in range(self.pool.num_blocks)}
        assert {block: level for block, level in cached.items() if level is not None} == {
            block: self.model.level(block, self.now) for block in self.cached()
        }
        assert len(self.pool.sessions._holders) == len(self.model.held())
        assert len(self.pool.sessions) == len(self.model.sessions)
        for key, _, _, blocks in self.model.sessions:
            assert blocks_of(self.pool.sessions, key) == tuple(blocks)


TestBlockPool = BlockPoolMachine.TestCase
