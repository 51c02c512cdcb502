"""The health probe: a small step that shows whether the executor still works after an error.

It has two rows, a chunk over two blocks and a single token, in blocks that are never assigned to a
request. The second row is sampled at random, except on the fused path on a GPU, where both rows are
greedy.
"""

import numpy as np

from penstock.executor.torch.slot_rules import SlotRules
from penstock.scheduler.batch import Batch
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.slot_arrays import SlotArrays

NUM_PROBE_BLOCKS = 3
"""Number of blocks that the probe needs."""


class HealthProbe:
    """Creates the step of the health probe (`batch`) and its slot rules (`rules`, empty).

    The step writes to the NUM_PROBE_BLOCKS blocks after the blocks of requests.
    """

    def __init__(self, info: ExecutorInfo) -> None:
        first_block, block_size = info.num_blocks, info.block_size
        arrays = SlotArrays(num_slots=2, max_seq_len=2 * block_size, block_size=block_size)
        arrays.num_tokens[:] = (min(block_size + 1, info.max_seq_len), 1)
        arrays.num_blocks[:] = (2, 1)
        arrays.block_table[0, :2] = (first_block, first_block + 1)
        arrays.block_table[1, 0] = first_block + 2
        arrays.temperature[1] = 1.0
        arrays.top_p[:] = (1.0, 0.5)
        arrays.repetition_penalty[:] = 1.0
        arrays.num_logprobs[:] = -1
        arrays.num_prompt_logprobs[:] = -1
        slots = np.array([0, 1], dtype=np.int32)
        self.rules = SlotRules(vocab_size=info.vocab_size, num_embeddings=info.vocab_size)
        self.batch = Batch(
            step=0,
            arrays=arrays,
            slots=slots,
            num_tokens=arrays.num_tokens.copy(),
            starts=np.zeros(2, dtype=np.int32),
            num_decodes=0,
            sampled_slots=slots,
        )
