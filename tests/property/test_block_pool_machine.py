"""The pool against a plain model: any order of allocate, share, register, release, forget."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.scheduler.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """`holders` are block tables; every block of a table carries one reference of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(1)
        self.holders: list[list[int]] = []
        self.digests = 0
        self.named: dict[bytes, int] = {}

    @initialize(num_blocks=st.integers(1, 12))
    def fresh(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

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
        blocks = self.pool.allocate(count).tolist()
        assert len(set(blocks)) == count
        assert not before & set(blocks), "a used block was handed out"
        # What was evicted must not be found again.
        self.named = {d: b for d, b in self.named.items() if b not in blocks}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.holders))
        block = data.draw(st.sampled_from(table))
        self.digests += 1
        digest = self.digests.to_bytes(4, "big")
        self.pool.register(block, digest)
        if block not in self.named.values():
            self.named[digest] = block

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        digests = data.draw(st.lists(st.sampled_from(sorted(self.named)), unique=True))
        blocks = self.pool.match(digests)
        assert blocks == [self.named[digest] for digest in digests]
        self.pool.share(blocks)
        if blocks:
            self.holders.append(blocks)

    @rule()
    def match_stops_at_the_first_unknown(self) -> None:
        known = sorted(self.named)[:2]
        assert self.pool.match([*known, b"unknown", *known]) == [self.named[d] for d in known]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(np.array(table, dtype=np.int32))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.holders))
        self.pool.forget(np.array(table, dtype=np.int32))
        self.named = {d: b for d, b in self.named.items() if b not in table}

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.faults() == []
        references = np.zeros(self.pool.num_blocks, dtype=int)
        for table in self.holders:
            for block in table:
                references[block] += 1
        assert references.tolist() == self.pool.ref_counts.tolist()
        assert self.pool.num_used == int((references > 0).sum())
        assert self.pool.num_available + self.pool.num_used == self.pool.num_blocks


TestBlockPool = BlockPoolMachine.TestCase


def test_the_least_recently_used_tail_goes_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for table, name in ((first, b"a"), (second, b"b")):
        for index, block in enumerate(table.tolist()):
            pool.register(block, name + bytes([index]))
    pool.release(second)
    pool.release(first)
    assert pool.allocate(1).tolist() == [second.tolist()[1]]
    assert pool.match([b"b\0", b"b\1"]) == [second.tolist()[0]]
    assert pool.match([b"a\0", b"a\1"]) == first.tolist()
