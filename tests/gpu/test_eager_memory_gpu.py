"""The eager path's pages leave enough memory for its largest steps; skipped without a CUDA device.

The tests limit the memory that they may use, so that other tests may run on the device at the same
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.device_memory import peak_bytes
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.kv_pages import block_bytes
from penstock.executor.torch.widest_step import last_tokens, set_widest_options
from penstock.scheduler.batch import Batch
from support.torch_models import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_SEQ_LEN, MAX_NUM_SEQS, BUDGET = 32_768, 128, 3584
VOCAB_SIZE = 32_000
MEMORY_BYTES = 12 << 30


@pytest.fixture
def memory_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Limit this process's memory on the device to MEMORY_BYTES more than it has now; return the
    limit in bytes. The executor sees a device of this size.
    """
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + MEMORY_BYTES
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    monkeypatch.setattr(
        "penstock.executor.torch.executor.free_bytes",
        lambda device: limit - torch.cuda.memory_allocated(device),
    )
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def make_executor(folder: Path) -> TorchExecutor:
    return TorchExecutor(
        ExecutorConfig(
            model_path=folder,
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            kv_memory_fraction=1.0,
        )
    )


def largest_steps(executor: TorchExecutor) -> list[Batch]:
    """Return steps with every sampling option: as many prompts as possible, one prompt that takes
    the whole token budget, the end of one long prompt, the ends of several, decodes that together
    use all blocks, and a mix of decodes and the end of a long prompt.
    """
    info = executor.info
    context = min(info.num_blocks * info.block_size // MAX_NUM_SEQS, MAX_SEQ_LEN)
    share = BUDGET // MAX_NUM_SEQS
    steps: list[Batch] = []
    for lengths, counts in (
        ([share] * MAX_NUM_SEQS, [share] * MAX_NUM_SEQS),
        ([BUDGET], [BUDGET]),
        ([MAX_SEQ_LEN], [BUDGET]),
        ([MAX_SEQ_LEN] * 7, [BUDGET // 7] * 7),
        ([context] * MAX_NUM_SEQS, [1] * MAX_NUM_SEQS),
        (
            [context - 1] * (MAX_NUM_SEQS - 1) + [MAX_SEQ_LEN],
            [1] * (MAX_NUM_SEQS - 1) + [BUDGET - MAX_NUM_SEQS + 1],
        ),
    ):
        batch = last_tokens(
            np.array(lengths),
            np.array(counts),
            max_seq_len=MAX_SEQ_LEN,
            block_size=info.block_size,
        )
        arrays = batch.arrays
        tokens, table = np.arange(arrays.token_ids.size), np.arange(arrays.block_table.size)
        arrays.token_ids[:] = (tokens % info.vocab_size).reshape(arrays.token_ids.shape)
        # Sequences of one step may share blocks; some rows write to the same ones.
        arrays.block_table[:] = (table % info.num_blocks).reshape(arrays.block_table.shape)
        arrays.num_prompt[:] = np.where(batch.num_tokens > 1, lengths, 1)
        set_widest_options(arrays, info.vocab_size)
        steps.append(batch)
    return steps


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_largest_steps_fit_into_memory_next_to_the_pages(
    name: str, tmp_path: Path, memory_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama has plain attention; gemma2 has materialised scores and a window."""
    folder = save_tiny_model(
        name,
        tmp_path,
        # 64 KiB of keys and values per token, so that pages fill the device.
        hidden_size=128,
        num_attention_heads=128,
        num_key_value_heads=64,
        head_dim=128,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_SEQ_LEN,
        initializer_range=0.02,
    )
    device = torch.device("cuda")
    free = memory_limit - torch.cuda.memory_allocated()

    executor: Any = make_executor(folder)

    model, info = executor._model, executor.info
    page_bytes = info.num_blocks * block_bytes(model.shapes, info.block_size, model.dtype)
    print(f"\n{name}: {(free - page_bytes) / 2**30:.2f} GiB of {free / 2**30:.1f} left for steps")
    assert free * 2 // 3 < page_bytes < free
    monkeypatch.setattr(executor, "_recover", lambda error: pytest.fail(f"repeated: {error}"))
    for batch in largest_steps(executor):
        taken = peak_bytes(device, partial(executor.launch, batch))
        print(f"{batch.num_rows} rows of {batch.num_tokens.sum()} tokens: {taken / 2**30:.2f} GiB")
        result = executor.collect()
        assert result.failures == ()
        assert len(result.tokens) == batch.num_rows
