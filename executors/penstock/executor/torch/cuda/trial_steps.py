"""Runs trial steps at load, to compare the fused step with the model's PyTorch modules and to
measure the memory of a step.

The comparison runs a short sequence, first as a chunk and then token by token; the measurement runs
the largest step that the settings allow.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.executor.torch.cuda.device_queue import DeviceQueue
from penstock.executor.torch.cuda.fused_forward import CudaFusedForward, empty_row_tokens
from penstock.executor.torch.cuda.row_staging import RowStaging
from penstock.executor.torch.whole_sequence import (
    NUM_CHUNK_TOKENS,
    NUM_TRIAL_TOKENS,
    trial_arrays,
    trial_batch,
)
from penstock.executor.torch.widest_step import last_tokens


def trial_logits(model: CudaFusedForward, queue: DeviceQueue, block_size: int) -> Tensor:
    """Return logits [NUM_TRIAL_TOKENS, vocabulary] of the sequence `trial_tokens`, computed in slot
    0, in the blocks from 0 on.

    Decodes alternate between a single row and a batch, because different kernels compute these.
    """
    arrays = trial_arrays(model.outer.embedding, NUM_TRIAL_TOKENS, block_size)
    staging = RowStaging(queue, max_rows=2, scratch=(1, arrays.block_table.shape[1]))
    rows = staging.stage_packed(
        trial_batch(arrays, 0, NUM_CHUNK_TOKENS),
        tokens_per_tile=model.tokens_per_tile,
        table_width=arrays.block_table.shape[1],
    )
    tokens = empty_row_tokens(rows.num_tokens, queue.device)
    hidden = model.packed(rows.staged, tokens, rows.chunks, num_decodes=0)
    every = torch.arange(rows.num_tokens, dtype=torch.int32, device=queue.device)
    found = [model.head(hidden, every)]
    staged = staging.empty_rows()
    for position in range(NUM_CHUNK_TOKENS, NUM_TRIAL_TOKENS):
        num_rows = 1 + position % 2
        staging.stage_decodes(trial_batch(arrays, position, 1), staged, num_rows)
        logits = found[0].new_empty((num_rows, model.vocab_size))
        model.decode(staged, tokens.first(num_rows), logits, rows=num_rows, is_long=False)
        queue.synchronize()  # before the host memory is written again
        found.append(logits[:1])
    return torch.cat(found)


def run_widest_step(
    model: CudaFusedForward,
    queue: DeviceQueue,
    *,
    num_tokens: int,
    max_rows: int,
    max_seq_len: int,
    block_size: int,
) -> None:
    """Run a step of at least `num_tokens` tokens (fewer if `max_rows` sequences of `max_seq_len`
    tokens have fewer), and the LM head for `max_rows` rows. All keys and values are written to
    block 0.
    """
    num_rows = min(-(-num_tokens // max_seq_len), max_rows)
    count = min(-(-num_tokens // num_rows), max_seq_len)
    counts = np.full(num_rows, count)
    batch = last_tokens(counts, counts, max_seq_len=max_seq_len, block_size=block_size)
    rows = RowStaging(queue, max_rows=1, scratch=(0, 0)).stage_packed(
        batch, tokens_per_tile=model.tokens_per_tile, table_width=batch.arrays.block_table.shape[1]
    )
    hidden = model.packed(
        rows.staged, empty_row_tokens(rows.num_tokens, queue.device), rows.chunks, num_decodes=0
    )
    wanted = torch.arange(max_rows, dtype=torch.int32, device=queue.device) % rows.num_tokens
    model.head(hidden, wanted)
