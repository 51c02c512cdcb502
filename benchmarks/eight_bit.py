"""Measures the loss of quality due to 8-bit weights or KV cache, with the demo model.

The packaged demo model is trained, so its perplexity is meaningful. Texts that it generated in
float32 are submitted as prompts; their log probabilities give the perplexity, and the change of
each token's log probability compared with 16 bits. Prefixes of the texts are continued greedily,
and the tokens before the first difference from 16 bits are counted.

    python benchmarks/eight_bit.py [--device cuda] [--full] [--json FILE]
"""

from __future__ import annotations

import itertools
import math
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from usage import needing

with needing("torch"):
    from tokenizers import Tokenizer

from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig
from penstock.executor.create import create_executor
from penstock.executor.models import resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed
from penstock.scheduler.request import RequestSpec, SamplingParams
from report import Outcome, arguments, at_most, print_rows, progress, run

WINDOW = 256
NUM_WINDOWS = {False: 40, True: 400}
NUM_CONTINUED, NUM_PROMPT, NUM_NEW = 20, 64, 64
SETTINGS = {
    "cuda": (("none", "auto"), ("fp8", "auto"), ("int8", "auto"), ("none", "fp8"), ("fp8", "fp8")),
    "cpu": (("none", "auto"), ("int8", "auto"), ("none", "int8"), ("int8", "int8")),
}
MAX_PERPLEXITY_RATIO = 1.03
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The quality of one setting, compared with 16 bits.

    `logprob_error`: mean absolute change of a token's log probability, nats. `agreed_share`: share
    of greedily generated tokens that come before the first difference.
    """

    quantization: str
    kv_cache_dtype: str
    perplexity: float
    perplexity_ratio: float = 1.0
    logprob_error: float = 0.0
    agreed_share: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    logprobs: NDArray[np.float64]
    continued: list[list[int]]


def measure(args: Namespace) -> Outcome:
    """Measure all settings of the device."""
    model = resolve_model("demo")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    windows = _drawn(model, tokenizer, NUM_WINDOWS[args.full])
    found: list[Quality] = []
    base: _Outcome | None = None
    for quantization, kv_cache_dtype in SETTINGS[args.device.partition(":")[0]]:
        config = ExecutorConfig(
            model_path=model,
            device=args.device,
            dtype="bfloat16",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=32,
            num_blocks=1024,
        )
        outcome = _run(config, windows)
        base = base or outcome
        found.append(_quality(config, outcome, base))
        progress(f"quantization {quantization}, kv_cache_dtype {kv_cache_dtype}: done")
    print_rows(f"{len(windows)} windows of {WINDOW} tokens", found)
    return found, [
        at_most(
            f"perplexity, weights {q.quantization}, KV cache {q.kv_cache_dtype}, over 16 bits",
            q.perplexity_ratio,
            MAX_PERPLEXITY_RATIO,
            "x",
        )
        for q in found[1:]
    ]


def _run(config: ExecutorConfig, windows: list[NDArray[np.int32]]) -> _Outcome:
    executor = create_executor(config)
    engine = Engine(executor, SchedulerConfig(max_num_waiting=4096), time.monotonic)
    scored = replace(GREEDY, num_prompt_logprobs=0)
    for key, window in enumerate(windows):
        engine.submit((_spec(key, window, 1, scored),))
    for index, window in enumerate(windows[:NUM_CONTINUED]):
        spec = _spec(len(windows) + index, window[:NUM_PROMPT], NUM_NEW, GREEDY)
        engine.submit((spec,))
    logprobs = np.zeros((len(windows), WINDOW))
    continued: list[list[int]] = [[] for _ in windows[:NUM_CONTINUED]]
    while engine.has_work:
        events = engine.step()
        for key, first, rows in events.prompt_logprobs:
            logprobs[key - 1, first : first + len(rows.chosen)] = rows.chosen
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            if key > len(windows):
                continued[key - len(windows) - 1].append(token)
        for end in events.ends:
            if isinstance(end, Failed):
                raise RuntimeError(f"a request failed: {end}")
    executor.close()
    return _Outcome(logprobs[:, 1:], continued)


def _drawn(model: Path, tokenizer: Tokenizer, count: int) -> list[NDArray[np.int32]]:
    """Return windows of text, int32 token ids [WINDOW], sampled from the model at temperature 1, in
    float32 on the CPU. The result is deterministic.
    """
    config = ExecutorConfig(model_path=model, dtype="float32", max_num_seqs=32, num_blocks=1024)
    executor = create_executor(config)
    engine = Engine(executor, SchedulerConfig(max_num_waiting=4096), time.monotonic)
    prompt = np.array(tokenizer.encode("The ").ids, dtype=np.int32)
    for key in range(count):
        sampling = SamplingParams(temperature=1.0, seed=key)
        engine.submit((_spec(key, prompt, WINDOW - len(prompt), sampling),))
    written: list[list[int]] = [prompt.tolist() for _ in range(count)]
    while engine.has_work:
        events = engine.step()
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            written[key - 1].append(token)
    executor.close()
    return [np.array(window, dtype=np.int32) for window in written]


def _spec(
    key: int, prompt: NDArray[np.int32], num_new: int, sampling: SamplingParams
) -> RequestSpec:
    return RequestSpec(
        key=key + 1,
        request_id=str(key),
        prompt_ids=prompt,
        max_tokens=num_new,
        sampling=sampling,
        arrival_s=time.monotonic(),
    )


def _quality(config: ExecutorConfig, outcome: _Outcome, base: _Outcome) -> Quality:
    perplexity = math.exp(-outcome.logprobs.mean())
    num_agreed = sum(
        sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
        )
        for a, b in zip(outcome.continued, base.continued, strict=True)
    )
    return Quality(
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        perplexity=perplexity,
        perplexity_ratio=perplexity / math.exp(-base.logprobs.mean()),
        logprob_error=float(np.abs(outcome.logprobs - base.logprobs).mean()),
        agreed_share=num_agreed / max(1, sum(map(len, base.continued))),
    )


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu")
    run(parser, measure)
