"""How the memory of the eager path is measured. The tests run on a CPU and replace the function
that measures peak memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cpu_kernels import kernels
from penstock.executor.torch.cpu_kernels.kernels import AUTO, PLAIN
from penstock.executor.torch.eager_memory import eager_step_bytes
from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.loading import load_model
from penstock.executor.torch.module_forward import eager_path
from penstock.executor.torch.step_forward import StepForward
from support.torch_models import MAX_SEQ_LEN, VOCAB_SIZE, save_tiny_model

MAX_NUM_SEQS, BUDGET = 6, 200


def measure(
    folder: Path, peak_of: Callable[[Callable[[], Any]], int]
) -> tuple[int, list[weakref.ref[StepForward]]]:
    """Call `eager_step_bytes` with this `peak_of`. Return the number of bytes, and a weak reference
    to each `StepForward` that was created.
    """
    config = ExecutorConfig(
        model_path=folder, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET
    )
    model = load_model(folder, device="cpu", dtype="float32")
    path = eager_path(model)
    made: list[weakref.ref[StepForward]] = []

    def make(pages: KVPages) -> StepForward:
        assert pages.num_blocks == 1
        forward = path.make(pages)
        made.append(weakref.ref(forward))
        return forward

    found = eager_step_bytes(
        config, model, replace(path, make=make), num_keys=1000, peak_of=peak_of
    )
    return found, made


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gemma3"])
@pytest.mark.parametrize("chosen", [AUTO, PLAIN])
def test_the_measured_step_is_a_whole_one_and_leaves_nothing(
    chosen: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_chosen", chosen)

    def peak_of(run: Callable[[], Any]) -> int:
        step = run()
        logits = step.forwarded.logits
        assert torch.isfinite(logits).all()
        assert logits.shape == (BUDGET, VOCAB_SIZE)
        assert step.sampled.is_good.all()
        assert len(step.sampled.tokens) == len(step.sampled.logprobs.chosen) == MAX_NUM_SEQS
        ((slot, first, logprobs),) = step.prompt_logprobs
        num_predicted = BUDGET - MAX_NUM_SEQS
        assert (slot, first) == (MAX_NUM_SEQS - 1, MAX_SEQ_LEN - num_predicted)
        assert len(logprobs.chosen) == num_predicted
        return 12_345

    found, (forward,) = measure(save_tiny_model(name, tmp_path), peak_of)

    assert found == 12_345
    assert forward() is None


def test_a_lack_of_memory_names_the_settings(tmp_path: Path) -> None:
    def peak_of(_run: Callable[[], Any]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        ValueError, match=r"^max_num_batched_tokens, max_num_seqs or max_seq_len requires more"
    ):
        measure(save_tiny_model("llama", tmp_path), peak_of)
