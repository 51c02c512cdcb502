"""The conversion of a batch into the inputs of the fused step's kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np

from penstock.executor.torch.cuda.row_staging import DRAWN, RowStaging
from penstock.scheduler.batch import Batch
from penstock.scheduler.slot_arrays import SlotArrays
from support.host_queue import HostQueue


@pytest.fixture
def batch() -> Batch:
    """Return a decode in slot 2, then a chunk in slot 0 with 8 cached tokens; blocks of 4."""
    arrays = SlotArrays(num_slots=3, max_seq_len=20, block_size=4)
    arrays.token_ids[:] = np.arange(60).reshape(3, 20)
    arrays.num_tokens[:] = (15, 0, 6)
    arrays.block_table[0] = (7, 8, 9, 10, 11)
    arrays.block_table[2, :2] = (4, 5)
    slots = np.array([2, 0], dtype=np.int32)
    return Batch(
        step=0,
        arrays=arrays,
        slots=slots,
        num_tokens=np.array([1, 7], dtype=np.int32),
        starts=np.array([6, 8], dtype=np.int32),
        num_decodes=1,
        sampled_slots=slots,
    )


def staging() -> RowStaging:
    return RowStaging(HostQueue(), max_rows=4, scratch=(3, 99))


def test_a_packed_step_holds_every_token_and_where_it_goes(batch: Batch) -> None:
    rows = staging().stage_packed(batch, tokens_a_tile=4, table_width=5)

    found = rows.staged[:, : rows.num_tokens].tolist()
    assert found[0] == [2] + [0] * 7
    assert found[1] == [6, *range(8, 15)]
    assert found[2] == [DRAWN, *range(8, 15)]
    assert found[3] == [5, 9, 9, 9, 9, 10, 10, 10]
    assert rows.wanted.tolist() == [0, 7]
    assert rows.chunks.firsts.tolist() == [1, 8]
    assert rows.chunks.tile_tokens.tolist() == [4, 0]


def test_cells_that_a_slot_never_computed_are_sent_for_the_devices_own_table(
    batch: Batch,
) -> None:
    """The scheduler's table may be narrower: it knows how many blocks there are."""
    rows = staging().stage_packed(batch, tokens_a_tile=4, table_width=11)

    assert rows.known_places.tolist() == [0, 1]
    assert rows.known_blocks.tolist() == [7, 8]
    moved = np.array([2, 1], dtype=np.int32)
    batch.arrays.block_table[1] = batch.arrays.block_table[0]
    other = Batch(
        step=1,
        arrays=batch.arrays,
        slots=moved,
        num_tokens=batch.num_tokens,
        starts=batch.starts,
        num_decodes=1,
        sampled_slots=moved,
    )

    rows = staging().stage_packed(other, tokens_a_tile=4, table_width=11)

    assert rows.known_places.tolist() == [11, 12]


def test_a_decode_known_to_the_host_is_sent_and_padding_is_scratch(batch: Batch) -> None:
    own = staging()
    staged = own.empty_rows()
    batch.arrays.num_tokens[2] = 7
    decode = Batch(
        step=0,
        arrays=batch.arrays,
        slots=batch.slots[:1],
        num_tokens=batch.num_tokens[:1],
        starts=batch.starts[:1],
        num_decodes=1,
        sampled_slots=batch.slots[:1],
    )

    own.stage_decodes(decode, staged, 2)

    assert staged[:, :2].tolist() == [[2, 3], [6, 0], [46, 0], [5, 99]]
