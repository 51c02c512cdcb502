"""Measures the memory of the eager path's steps on a CUDA device, before the pages are allocated.

Runs the widest step over one block. Attention processes tiles of limited size (`TileLimits`), so
the result does not grow with the number of pages.
"""

from collections.abc import Callable

import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.attention_interface import attach_runner
from penstock.executor.torch.computed_step import compute_step
from penstock.executor.torch.device_memory import fitting
from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.paged_attention import SCRATCH
from penstock.executor.torch.serving_info import served_length
from penstock.executor.torch.slot_rules import SlotRules
from penstock.executor.torch.step_forward import ForwardPath
from penstock.executor.torch.whole_sequence import WholeSequence
from penstock.executor.torch.widest_step import StepLimits, widest_step


@torch.inference_mode()
def eager_step_bytes(
    config: ExecutorConfig,
    model: LoadedModel,
    path: ForwardPath,
    *,
    num_keys: int,
    peak_of: Callable[[Callable[[], object]], int],
) -> int:
    """Return the peak memory of the widest step, in bytes, without weights and pages.

    `num_keys`: the number of tokens whose keys and values would fill the free memory. It limits the
    contexts in the measured step; sequences that share blocks may have more tokens in total.
    `peak_of`: calls a function and returns its peak memory in bytes. Raises ValueError naming the
    settings if the device has too little memory.
    """
    limits = StepLimits(
        max_tokens=config.max_step_tokens,
        max_rows=config.max_num_seqs,
        max_seq_len=min(served_length(config, model), max(num_keys, 2)),
        num_keys=num_keys,
        num_mask_elements=SCRATCH[model.device.type].num_mask_elements,
    )
    batch = widest_step(limits, vocab_size=model.vocab_size, block_size=config.block_size)
    rules = SlotRules(vocab_size=model.vocab_size, num_embeddings=model.num_embeddings)
    with fitting("max_num_batched_tokens, max_num_seqs or max_seq_len", config):
        pages = KVPages(
            model.shapes,
            num_blocks=1,
            block_size=config.block_size,
            dtype=path.kv_dtype,
            device=model.device,
        )
        forward = path.make(pages)
        taken = peak_of(lambda: compute_step(forward, batch, rules))
    attach_runner(model.module, WholeSequence())  # so that `forward` and its memory can be freed
    return taken
