"""How a batch becomes the inputs of the fused step's kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from penstock.executor.torch.cuda.device_step import OutcomeMemory
from penstock.executor.torch.cuda.row_staging import DRAWN, RowStaging, packed_size
from penstock.scheduler.batch import Batch
from penstock.scheduler.slot_arrays import SlotArrays
from support.batches import batch_of
from unit.executor.host_queue import HostQueue


@pytest.fixture
def batch() -> Batch:
    """Provide a batch with a decode in slot 2 and a prefill chunk in slot 0, which follows 8 cached
    tokens. Blocks have 4 tokens.
    """
    arrays = SlotArrays(num_slots=3, max_seq_len=20, block_size=4)
    arrays.token_ids[:] = np.arange(60).reshape(3, 20)
    arrays.num_tokens[:] = (15, 0, 6)
    arrays.block_table[0] = (7, 8, 9, 10, 11)
    arrays.block_table[2, :2] = (4, 5)
    return batch_of(arrays, [(2, 6, 1), (0, 8, 7)])


def staging() -> RowStaging:
    return RowStaging(HostQueue(), max_rows=4, scratch=(3, 99))


def test_a_packed_step_holds_every_token_and_where_it_goes(batch: Batch) -> None:
    rows = staging().stage_packed(batch, tokens_per_tile=4, table_width=5)

    found = rows.staged[:, : rows.num_tokens].tolist()
    assert found[0] == [2] + [0] * 7
    assert found[1] == [6, *range(8, 15)]
    assert found[2] == [DRAWN, *range(8, 15)]
    assert found[3] == [5, 9, 9, 9, 9, 10, 10, 10]
    assert rows.wanted.tolist() == [0, 7]
    assert rows.chunks.firsts.tolist() == [1, 8]
    assert rows.chunks.tile_tokens.tolist() == [4, 0]


def test_blocks_of_cached_tokens_are_sent_to_the_block_table_of_the_device(
    batch: Batch,
) -> None:
    """Each block is sent with its flat index in the device's block table. The rows of this table
    are wider than those of the scheduler's table.
    """
    rows = staging().stage_packed(batch, tokens_per_tile=4, table_width=11)

    assert rows.table_places.tolist() == [0, 1]
    assert rows.table_blocks.tolist() == [7, 8]
    batch.arrays.block_table[1] = batch.arrays.block_table[0]
    other = batch_of(batch.arrays, [(2, 6, 1), (1, 8, 7)])

    rows = staging().stage_packed(other, tokens_per_tile=4, table_width=11)

    assert rows.table_places.tolist() == [11, 12]


def test_a_decode_known_to_the_host_is_sent_and_padding_is_scratch(batch: Batch) -> None:
    own = staging()
    staged = own.empty_rows()
    batch.arrays.num_tokens[2] = 7

    own.stage_decodes(batch_of(batch.arrays, [(2, 6, 1)]), staged, 2)

    assert staged[:, :2].tolist() == [[2, 3], [6, 0], [46, 0], [5, 99]]


class CountingQueue(HostQueue):
    """Counts its allocations of pinned memory."""

    def __init__(self) -> None:
        self.num_allocated = 0

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_allocated += 1
        return super().pinned(shape, dtype)


@pytest.mark.parametrize(("num_chunks", "num_decodes"), [(1, 0), (6, 0), (3, 20), (40, 0), (7, 33)])
@pytest.mark.parametrize("is_short", [False, True])
def test_the_largest_step_allocates_no_pinned_memory(
    num_chunks: int, num_decodes: int, is_short: bool
) -> None:
    num_tokens, num_rows, tile, block_size, past = 200, 40, 16, 4, 800
    arrays = SlotArrays(num_slots=num_rows, max_seq_len=1200, block_size=block_size)
    counts = np.ones(num_decodes + num_chunks, dtype=np.int32)
    counts[-1] = num_tokens - len(counts) + 1
    starts = np.full_like(counts, past)
    slots = np.arange(len(counts), dtype=np.int32)
    step = Batch(
        step=0,
        arrays=arrays,
        slots=slots,
        num_tokens=counts,
        starts=starts,
        num_decodes=num_decodes,
        sampled_slots=slots,
    )
    size = packed_size(
        num_tokens=num_tokens,
        num_rows=num_rows,
        tokens_per_tile=tile,
        table_width=300,
    )
    queue = CountingQueue()
    own = RowStaging(queue, max_rows=num_rows, scratch=(40, 0), num_packed=4 if is_short else size)
    num_before = queue.num_allocated

    own.stage_packed(step, tokens_per_tile=tile, table_width=300)
    rows = own.stage_packed(step, tokens_per_tile=tile, table_width=300)

    assert queue.num_allocated - num_before == int(is_short)
    assert rows.num_tokens == num_tokens
    assert len(rows.table_blocks) == num_chunks * past // block_size


def test_flags_of_a_usual_step_allocate_no_pinned_memory() -> None:
    queue = CountingQueue()
    memory = OutcomeMemory(queue, max_rows=2, max_tokens=8)
    num_before = queue.num_allocated

    for count in (8, 3):
        flags = torch.arange(count) % 2 == 0
        assert torch.equal(memory.fetch_flags(flags), flags)

    assert queue.num_allocated == num_before
    assert torch.equal(memory.fetch_flags(torch.ones(9, dtype=torch.bool)), torch.ones(9).bool())
    assert queue.num_allocated == num_before + 1
