"""The snapshot of a watch and its changes together give exactly the cached blocks of its salt.

This holds for any order of admissions, growth, ends, invalidated blocks and evictions, over several
salts. A watch may start and be read at any time; its snapshot is read in pieces.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.cache_index import CachedBlock, CacheWatch
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.request import Request, RequestSpec
from penstock.scheduler.slot_arrays import SlotArrays
from support.examples import fewer_examples

BLOCK, NUM_BLOCKS, NUM_SLOTS, MAX_LEN = 2, 12, 3, 16
SALTS = (b"one", b"two")


class Replay:
    """A subscriber's copy of the watched blocks. It checks that parents come before children in the
    snapshot.
    """

    def __init__(self, watch: CacheWatch) -> None:
        self.watch = watch
        self.blocks: dict[bytes, CachedBlock] = {}
        self._num_left = watch.num_blocks
        self._known_parents: set[bytes] = set()

    def read(self, max_num: int) -> None:
        """Read at most `max_num` blocks of the snapshot; once it is complete, the changes."""
        if self._num_left:
            piece = self.watch.take_blocks(max_num)
            assert piece
            self._num_left -= len(piece)
            for block in piece:
                self._store(block)
                # Parents come before children.
                assert block.digest not in self._known_parents
                self._known_parents.add(block.parent)
            return
        for change in self.watch.take_changes():
            if isinstance(change, CachedBlock):
                self._store(change)
            else:
                del self.blocks[change]

    def read_all(self) -> None:
        while self._num_left:
            self.read(2)
        self.read(2)

    def _store(self, block: CachedBlock) -> None:
        assert block.digest not in self.blocks
        tokens = np.frombuffer(block.tokens, dtype=np.int32)
        root = block.parent or chain_root(self.watch.salt)
        assert hash_blocks(tokens, BLOCK, root) == (block.digest,)
        self.blocks[block.digest] = block


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arrays = SlotArrays(num_slots=NUM_SLOTS, max_seq_len=MAX_LEN, block_size=BLOCK)
        self.cache = KVCache(self.arrays, NUM_BLOCKS)
        self.cache_index = self.cache.enable_cache_index()
        self.running: dict[int, Request] = {}
        self.salt_of: dict[bytes, bytes] = {}
        self.replays: list[Replay] = []
        self.num_made = 0

    @rule(
        salt=st.sampled_from((*SALTS, b"")),
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN - 1),
    )
    def admit(self, salt: bytes, ids: list[int]) -> None:
        slot = next((slot for slot in range(NUM_SLOTS) if slot not in self.running), None)
        if slot is None:
            return
        self.num_made += 1
        tokens = np.array(ids, dtype=np.int32)
        digests = hash_blocks(tokens, BLOCK, chain_root(salt)) if salt else ()
        spec = RequestSpec(
            key=self.num_made, request_id="r", prompt_ids=tokens, max_tokens=4,
            hash_salt=salt, block_hashes=digests,
        )  # fmt: skip
        request = Request(
            spec=spec, sequence=self.num_made, tokens=tokens, block_hashes=list(digests), slot=slot
        )
        matched = self.cache.match(request)
        if self.cache.num_taken(matched, len(ids)) > self.cache.pool.num_available:
            return
        self.arrays.fill(request)
        self.cache.admit(slot, matched, len(ids))
        request.num_registered_blocks = len(matched)
        self.cache.extend(slot, self.cache.num_missing(slot, len(ids)))
        self.running[slot] = request

    @rule(slot=st.integers(0, NUM_SLOTS - 1), token=st.integers(0, 1), is_named=st.booleans())
    def grow(self, slot: int, token: int, is_named: bool) -> None:
        request = self.running.get(slot)
        if request is None:
            return
        num_tokens = int(self.arrays.num_tokens[slot])
        missing = self.cache.num_missing(slot, num_tokens + 1)
        if num_tokens < MAX_LEN and missing <= self.cache.pool.num_available:
            self.cache.extend(slot, missing)
            self.arrays.token_ids[slot, num_tokens] = token
            self.arrays.num_tokens[slot] = num_tokens + 1
        if is_named:
            self.name(request)

    @rule(slot=st.integers(0, NUM_SLOTS - 1), is_trusted=st.booleans())
    def leave(self, slot: int, is_trusted: bool) -> None:
        request = self.running.pop(slot, None)
        if request is None:
            return
        if is_trusted:
            self.name(request)
        else:
            self.cache.forget(slot)
        self.cache.free(request, 0.0)
        self.arrays.clear(slot)

    def name(self, request: Request) -> None:
        self.cache.register(request, int(self.arrays.num_tokens[request.slot]))
        for digest in request.block_hashes:
            self.salt_of[digest] = request.spec.hash_salt

    @precondition(lambda self: len(self.replays) < 3)
    @rule(salt=st.sampled_from(SALTS))
    def begin_watch(self, salt: bytes) -> None:
        self.replays.append(Replay(self.cache_index.watch(salt)))

    @precondition(lambda self: self.replays)
    @rule(max_num=st.integers(1, 3))
    def read(self, max_num: int) -> None:
        self.replays[0].read(max_num)

    @precondition(lambda self: self.replays)
    @rule()
    def end_watch(self) -> None:
        replay = self.replays.pop(0)
        replay.read_all()
        cached = {
            digest for digest in self.cache_index._chain_of if self.cache.pool.match([digest])
        }
        salt = replay.watch.salt
        assert set(replay.blocks) == {one for one in cached if self.salt_of[one] == salt}
        self.cache_index.unwatch(replay.watch)

    @invariant()
    def books_balance(self) -> None:
        assert not any(self.cache.pool.faults())

    def teardown(self) -> None:
        while self.replays:
            self.end_watch()


TestCacheIndex = IndexMachine.TestCase
TestCacheIndex.settings = settings(fewer_examples(20), stateful_step_count=40)
