"""Runs one engine of `cpu_peers.py`, in a separate interpreter.

    cpu_peer_side.py ENGINE MODEL THREADS OPTIONS FD

ENGINE: penstock, eager, batch, vllm or openvino; OPTIONS: its options as JSON. Reads runs from
stdin, one per line: {"prompts": [[token, ...]], "num_new": n, "concurrency": n}. Writes JSON lines
to the descriptor FD: one when it is ready, then rates and times of each run. Imports Penstock only
for the first three, because it is not installed in the environments of the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from usage import print_usage

MAX_LENGTH = 1024
BUDGET = 2048
"""Maximum tokens in one step, for all engines."""
NUM_SLOTS = 64

Progress = Iterator[tuple[int, int, bool]]
"""For each request that got tokens in a step: key, number of new tokens, whether it is finished."""


class Vllm:
    """vLLM's engine, stepped directly, without its server."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        os.environ.update(
            VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            HF_HUB_OFFLINE="1",
        )
        vllm: Any = import_module("vllm")
        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=BUDGET,
            enable_prefix_caching=False,
            **options,
        ).llm_engine
        self._seen: dict[str, int] = {}

    def add(self, key: int, prompt: list[int], num_new: int) -> None:
        params = self._params(max_tokens=num_new, ignore_eos=True, temperature=0, detokenize=False)
        self._engine.add_request(str(key), {"prompt_token_ids": prompt}, params)
        self._seen[str(key)] = 0

    def step(self) -> Progress:
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            num_new, self._seen[output.request_id] = count - self._seen[output.request_id], count
            yield int(output.request_id), num_new, output.finished


class OpenVino:
    """The continuous-batching pipeline of OpenVINO GenAI, in this process."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import numpy as np

        openvino: Any = import_module("openvino")
        genai: Any = import_module("openvino_genai")
        self._array: Callable[[list[int]], Any] = lambda prompt: openvino.Tensor(
            np.array([prompt], dtype=np.int64)
        )
        self._config: Any = genai.GenerationConfig
        self._finished: Any = genai.GenerationStatus.FINISHED
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = 2
        scheduling.max_num_batched_tokens = BUDGET
        scheduling.max_num_seqs = NUM_SLOTS
        scheduling.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": threads,
            **options,
        }
        self._pipe = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", properties)
        self._handles: dict[int, Any] = {}

    def add(self, key: int, prompt: list[int], num_new: int) -> None:
        config: Any = self._config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_new, True, False
        config.eos_token_id = 2
        self._handles[key] = self._pipe.add_request(key, self._array(prompt), config)

    def step(self) -> Progress:
        self._pipe.step()
        for key, handle in list(self._handles.items()):
            num_new = 0
            while handle.can_read():
                num_new += sum(len(part.generated_ids) for part in handle.read().values())
            is_done = handle.get_status() == self._finished
            if is_done:
                del self._handles[key]
            if num_new or is_done:
                yield key, num_new, is_done


def _torch(threads: int) -> Any:
    """Load torch with this number of threads; return the module."""
    # `engine_cpu` sets how threads wait for each other and then loads torch: import it first.
    import_module("engine_cpu")
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)
    return torch


def penstock(model: str, threads: int, options: dict[str, Any], *, is_eager: bool = False) -> Any:
    """Return Penstock's scheduler and torch executor, without the service."""
    from pathlib import Path

    _torch(threads)
    from engine_cpu import EngineRun
    from penstock.executor.config import ExecutorConfig
    from penstock.executor.torch.create import create_torch_executor
    from penstock.executor.torch.executor import TorchExecutor

    config = ExecutorConfig(
        model_path=Path(model),
        max_num_seqs=NUM_SLOTS,
        max_seq_len=MAX_LENGTH,
        kv_cache_bytes=2 << 30,
        **options,
    )
    executor = TorchExecutor(config) if is_eager else create_torch_executor(config)
    return EngineRun(executor, BUDGET)


class WholeBatch:
    """Generates for all requests as one batch: with `transformers`, or with `DenseLlama`, a plain
    PyTorch loop with a dense cache (the lower bound for PyTorch's operators).
    """

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        self._torch = _torch(threads)
        transformers, dense = import_module("transformers"), import_module("dense_llama")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=self._torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._model = loaded
        self._dense: Any = dense.DenseLlama(loaded) if options["is_dense"] else None
        self._waiting: dict[int, list[int]] = {}
        self._num_new = 0

    def add(self, key: int, prompt: list[int], num_new: int) -> None:
        self._waiting[key], self._num_new = prompt, num_new

    def step(self) -> Progress:
        waiting, self._waiting = self._waiting, {}
        if self._dense is not None:
            self._dense.generate(list(waiting.values()), self._num_new)
        else:
            self._generate(list(waiting.values()))
        for key in waiting:
            yield key, self._num_new, True

    def _generate(self, prompts: list[list[int]]) -> None:
        """Run `transformers` generate over one left-padded batch."""
        torch, longest = self._torch, max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=self._num_new,
                min_new_tokens=self._num_new,
                do_sample=False,
                pad_token_id=0,
            )


def closed_loop(engine: Any, run: dict[str, Any]) -> dict[str, Any]:
    """Run all prompts, `concurrency` at a time.

    Returns a dict with:
        tokens_per_s: Output tokens per second.
        per_processor_s: Output tokens per second of this process's CPU time.
        ttft: Times to the first token, seconds.
        itl: Times between later tokens, seconds.
    """
    waiting = list(enumerate(run["prompts"]))[::-1]
    submitted: dict[int, float] = {}
    last: dict[int, float] = {}
    ttft: list[float] = []
    itl: list[float] = []
    num_tokens, start, busy = 0, time.perf_counter(), time.process_time()
    while waiting or submitted:
        while waiting and len(submitted) < run["concurrency"]:
            key, prompt = waiting.pop()
            engine.add(key, prompt, run["num_new"])
            submitted[key] = time.perf_counter()
        progress = list(engine.step())
        now = time.perf_counter()
        for key, num_new, is_done in progress:
            num_tokens += num_new
            if num_new:
                (itl if key in last else ttft).append(now - last.get(key, submitted[key]))
                last[key] = now
            if is_done:
                del submitted[key]
    seconds = time.perf_counter() - start
    return {
        "tokens_per_s": num_tokens / seconds,
        "per_processor_s": num_tokens / (time.process_time() - busy),
        "ttft": ttft,
        "itl": itl,
    }


ENGINES: dict[str, Callable[[str, int, dict[str, Any]], Any]] = {
    "penstock": penstock,
    "eager": partial(penstock, is_eager=True),
    "batch": WholeBatch,
    "vllm": Vllm,
    "openvino": OpenVino,
}


def main() -> None:
    print_usage(__doc__, num_arguments=5)
    name, model, threads, options, descriptor = sys.argv[1:]
    with os.fdopen(int(descriptor), "w") as answers:
        engine = ENGINES[name](model, int(threads), json.loads(options))
        print(json.dumps({"ready": name}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(closed_loop(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
