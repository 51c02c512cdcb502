"""Measures the scratch memory of prefill and decode in the torch executor, and the time of a long
prompt.

Uses one layer in bfloat16, a prompt of 8,192 tokens in chunks of 2,048, and two output tokens. Each
model runs in a separate process, whose peak resident size above idle is measured.

    python benchmarks/attention_memory.py [--full] [--json FILE]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import Outcome, arguments, at_most, print_rows, run

CHUNK = 2048
CONTEXT = 8192
MAX_MIB = 300.0
_SMALL = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "plain, 16 heads": ("llama", _SMALL),
    "sinks, 16 heads": ("gpt_oss", _SMALL),
    "soft-cap, 16 heads": ("gemma2", _SMALL),
    # A layer of gpt-oss-20b (without experts) and of Gemma 2 9B.
    "gpt-oss-20b": (
        "gpt_oss",
        {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    ),
    "gemma-2-9b": (
        "gemma2",
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256},
    ),
}
_QUICK = tuple(SHAPES)[:3]
_JUDGED = ("sinks, 16 heads", "soft-cap, 16 heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of one measurement. `peak_mib`: peak resident memory above idle. `seconds`:
    duration of the request.
    """

    name: str
    peak_mib: float
    seconds: float


def build_model(name: str, folder: Path) -> None:
    """Write a model of one full-attention layer with random weights in bfloat16; `name`: key of
    `SHAPES`.
    """
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

    model_type, heads = SHAPES[name]
    shape: dict[str, Any] = {
        **heads,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "max_position_embeddings": CONTEXT + 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    full: dict[str, Any] = {"layer_types": ["full_attention"]}
    config: Any
    if model_type == "gpt_oss":
        rope = {"rope_type": "default", "rope_theta": 1e4}
        config = GptOssConfig(
            **shape, **full, num_local_experts=2, num_experts_per_tok=1, rope_parameters=rope
        )
    elif model_type == "gemma2":
        config = Gemma2Config(**shape, **full, query_pre_attn_scalar=heads["head_dim"])
    else:
        config = LlamaConfig(**shape)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def measured(name: str) -> Measured:
    """Build the model `name` of `SHAPES`, and measure one request in this process."""
    import numpy as np

    from penstock.executor.config import ExecutorConfig
    from penstock.executor.torch.executor import TorchExecutor
    from penstock.scheduler.config import SchedulerConfig
    from penstock.scheduler.engine import Engine
    from penstock.scheduler.request import RequestSpec, SamplingParams

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        build_model(name, Path(folder))
        executor = TorchExecutor(
            ExecutorConfig(model_path=Path(folder), num_blocks=CONTEXT // 16 + 8, max_num_seqs=4)
        )
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=CHUNK), time.monotonic)
    prompt = np.random.default_rng(0).integers(3, 250, CONTEXT).astype(np.int32)
    spec = RequestSpec(
        key=1,
        request_id="1",
        prompt_ids=prompt,
        max_tokens=2,
        sampling=SamplingParams(temperature=0.0),
        arrival_s=time.monotonic(),
    )
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    engine.submit((spec,))
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(name=name, peak_mib=(peak - idle) / 1024, seconds=seconds)


def measure_in_process(name: str) -> Measured:
    """Run one measurement in a new process, because the peak resident size of a process never
    decreases; return the result.
    """
    command = [sys.executable, __file__, "--one", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure(options: Namespace) -> Outcome:
    """Measure all models with `--full`, otherwise the three small ones."""
    names = tuple(SHAPES) if options.full else _QUICK
    found = [measure_in_process(name) for name in names]
    title = f"A prompt of {CONTEXT} tokens in chunks of {CHUNK}, one layer, bfloat16"
    print_rows(f"{title}; peak above idle", found)
    return found, [
        at_most(f"{one.name}: peak memory above idle", one.peak_mib, MAX_MIB, "MiB")
        for one in found
        if one.name in _JUDGED
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(asdict(measured(sys.argv[2]))))
    else:
        run(arguments(__doc__), measure)
