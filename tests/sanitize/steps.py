"""Runs fused steps of tiny models under NVIDIA's memory checker. The runs cover decodes, chunked
prefill, every sampling option, 8-bit weights (FP8, INT8), an FP8 KV cache, head sizes that are not
powers of two, and sliding-window attention.

    compute-sanitizer --tool memcheck python tests/sanitize/steps.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python tests/sanitize/steps.py --exact

With `--exact` no CUDA graph is captured, so that every tensor can be a separate allocation: the
checker then detects an access to the first byte after a tensor's end.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.create import create_torch_executor
from penstock.executor.torch.executor import TorchExecutor
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import SamplingParams
from support.core import make_spec, outputs
from support.torch_differential import run_mixed

_SHAPE: dict[str, Any] = {
    "vocab_size": 4100,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_WIDE = {"head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": True}
_ODD = {
    "hidden_size": 240,
    "head_dim": 40,
    "num_attention_heads": 6,
    "intermediate_size": 336,
    "vocab_size": 1001,
}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "wide": LlamaConfig(**{**_SHAPE, **_WIDE}),
    "odd": LlamaConfig(**{**_SHAPE, **_ODD}),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE),
    "window": MistralConfig(**_SHAPE, sliding_window=33),
}
PLAIN = SamplingParams(temperature=0.8)
FLAT = SamplingParams(temperature=5.0, top_p=0.99)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias=((5, 1.0), (9, -2.0)),
    num_logprobs=5,
    num_prompt_logprobs=2,
)
RUNS: tuple[tuple[str, dict[str, Any], tuple[SamplingParams, ...]], ...] = (
    ("llama", {}, (PLAIN, EVERYTHING, FLAT)),
    ("wide", {}, (EVERYTHING, FLAT)),
    ("odd", {}, (EVERYTHING,)),
    ("qwen2", {}, (PLAIN,)),
    ("qwen3", {}, (PLAIN,)),
    ("window", {}, (PLAIN,)),
    ("llama", {"quantization": "fp8"}, (PLAIN,)),
    ("qwen2", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, (PLAIN,)),
    ("odd", {"quantization": "int8"}, (PLAIN,)),
    ("wide", {"quantization": "int8", "kv_cache_dtype": "fp8"}, (PLAIN,)),
    ("window", {"kv_cache_dtype": "fp8"}, (EVERYTHING,)),
)
_LENGTHS = (1, 40, 300, 17, 16, 33)
_LONG = 2300
"""Longer than `tiles.LONG_CONTEXT`, where one row has more splits."""


@dataclass(frozen=True, slots=True)
class _RepeatedRun:
    """Stands for a captured graph: calls `run` again instead of a replay."""

    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


def _capture_nothing() -> None:
    from penstock.executor.torch.cuda.device_queue import CudaQueue

    def capture(queue: CudaQueue, run: Callable[[], None]) -> _RepeatedRun:
        with queue.active():
            run()
        queue.synchronize()
        return _RepeatedRun(run)

    replaced: Any = CudaQueue
    replaced.capture = capture


def _folder(name: str, parent: Path) -> Path:
    folder = parent / name
    if not folder.exists():
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(MODELS[name])
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _run(executor: Executor, sampling: SamplingParams, lengths: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    specs = [
        make_spec(
            key,
            random.integers(3, 1000, length).tolist(),
            max_tokens=6,
            min_tokens=3,
            stop_ids=(1, 7),
            block_size=16,
            sampling=replace(sampling, seed=key),
        )
        for key, length in enumerate(lengths, start=1)
    ]
    reported = outputs(run_mixed(executor, specs, budget=48))
    assert all(3 <= len(reported[spec.key]) <= 6 for spec in specs)


def main() -> None:
    is_exact = "--exact" in sys.argv[1:]
    if is_exact:
        _capture_nothing()
    with tempfile.TemporaryDirectory() as parent:
        for name, fields, samplings in RUNS:
            begun_s = time.monotonic()
            executor = create_torch_executor(
                ExecutorConfig(
                    model_path=_folder(name, Path(parent)),
                    device="cuda",
                    dtype="bfloat16",
                    max_num_seqs=5,
                    num_blocks=200,
                    max_num_batched_tokens=256,
                    max_seq_len=2600 if name == "llama" else 600,
                    **fields,
                )
            )
            assert not isinstance(executor, TorchExecutor), "the eager path serves it"
            for sampling in samplings:
                _run(executor, sampling, _LENGTHS)
            if name == "llama":
                _run(executor, PLAIN, (_LONG,))
            executor.close()
            print(f"{name} {fields}: {time.monotonic() - begun_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
