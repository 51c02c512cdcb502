import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.block_hash import DIGEST_BYTES, chain_root, hash_blocks

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 8))
def test_one_digest_for_each_full_block(tokens: list[int], block_size: int) -> None:
    digests = hash_blocks(np.array(tokens, np.int32), block_size, chain_root(b"a"))
    assert len(digests) == len(tokens) // block_size
    assert all(len(digest) == DIGEST_BYTES for digest in digests)


@given(TOKENS, st.integers(1, 8), st.integers(0, 40))
def test_a_chain_can_be_continued_at_any_block(
    tokens: list[int], block_size: int, cut: int
) -> None:
    ids = np.array(tokens, np.int32)
    whole = hash_blocks(ids, block_size, chain_root(b"a"))
    cut = min(cut // block_size, len(whole))
    head = hash_blocks(ids[: cut * block_size], block_size, chain_root(b"a"))
    tail = hash_blocks(ids[cut * block_size :], block_size, (head or (chain_root(b"a"),))[-1])
    assert head + tail == whole


def test_a_digest_names_the_whole_prefix_and_the_salt() -> None:
    first = hash_blocks(np.array([1, 2, 3, 4], np.int32), 2, chain_root(b"a"))
    other_head = hash_blocks(np.array([9, 2, 3, 4], np.int32), 2, chain_root(b"a"))
    other_salt = hash_blocks(np.array([1, 2, 3, 4], np.int32), 2, chain_root(b"b"))
    assert not set(first) & set(other_head)
    assert not set(first) & set(other_salt)


def test_a_slice_of_an_array_hashes_like_a_copy() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    column = table[:, 1]
    assert hash_blocks(column, 1, b"") == hash_blocks(column.copy(), 1, b"")
