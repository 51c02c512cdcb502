"""Every captured graph of decode steps is compared with forward passes of `NaiveModel`, in float32;
skipped without CUDA.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.create import create_torch_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import RequestSpec, SamplingParams
from support.core import FakeClock, make_spec
from support.torch_models import VOCAB_SIZE, NaiveModel, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_ROWS = 256
MAX_SEQ_LEN = 4096
LONG_CONTEXT = 2048
GREEDY = SamplingParams(temperature=0.0, num_logprobs=0)
MAX_ERROR = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.03}
"""Limit of the error of a log probability: a token of another context differs by more."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny_model(
        request.param, folder, max_position_embeddings=MAX_SEQ_LEN, initializer_range=0.1
    )


def specs_of(lengths: list[int], max_tokens: list[int]) -> list[RequestSpec]:
    random = np.random.default_rng(3)
    return [
        make_spec(
            key,
            random.integers(3, VOCAB_SIZE, length).tolist(),
            max_tokens=count,
            hashed=False,
            sampling=GREEDY,
        )
        for key, (length, count) in enumerate(zip(lengths, max_tokens, strict=True), start=1)
    ]


def run_together(
    folder: Path, specs: list[RequestSpec], dtype: str
) -> tuple[list[StepEvents], set[Any], set[Any]]:
    """Submit the requests together, and run them to their end.

    Returns the events, the keys of the forward graphs that were replayed, and the keys of those
    that were captured. A key is (number of rows, whether a row has a long context).
    """
    config = ExecutorConfig(
        model_path=folder,
        device="cuda",
        dtype=dtype,
        max_num_seqs=MAX_ROWS,
        num_blocks=2 + sum(-(-(len(s.prompt_ids) + s.max_tokens) // 16) for s in specs),
    )
    executor: Any = create_torch_executor(config)
    graphs, replayed = executor._graphs._forwards, set[Any]()
    executor._graphs._forwards = _Recorded(graphs, replayed)
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=1 << 16), FakeClock())
    engine.submit(tuple(specs))
    reported = []
    while engine.has_work:
        reported.append(engine.step())
    engine.check_integrity()
    return reported, replayed, set(graphs)


class _Recorded(dict[Any, Any]):
    """A dictionary that adds every key that is looked up to the set `found`."""

    def __init__(self, graphs: dict[Any, Any], found: set[Any]) -> None:
        super().__init__(graphs)
        self._found = found

    def __getitem__(self, key: Any) -> Any:
        self._found.add(key)
        return super().__getitem__(key)


def max_error(reported: list[StepEvents], specs: list[RequestSpec], naive: NaiveModel) -> float:
    """Return the largest absolute error of an output token's log probability against the naive
    model's.
    """
    tokens, found = defaultdict[int, list[int]](list), defaultdict[int, list[float]](list)
    for events in reported:
        if events.logprobs is not None:
            columns = (events.keys, events.tokens, events.logprobs.chosen)
            for key, token, logprob in zip(*(each.tolist() for each in columns), strict=True):
                tokens[key].append(token)
                found[key].append(logprob)
    errors = []
    for spec in specs:
        assert len(tokens[spec.key]) == spec.max_tokens
        expected = naive_logprobs(naive, spec.prompt_ids.tolist(), tokens[spec.key])
        errors.append(np.abs(np.array(found[spec.key]) - expected).max())
    return float(max(errors))


def naive_logprobs(naive: NaiveModel, prompt: list[int], output: list[int]) -> NDArray[np.float64]:
    logits = naive.logits([*prompt, *output][:-1])[len(prompt) - 1 :].astype(np.float64)
    chosen = logits[np.arange(len(output)), output]
    highest = logits.max(-1)
    return np.asarray(chosen - highest - np.log(np.exp(logits - highest[:, None]).sum(-1)))


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_every_batch_size_decodes_like_a_full_forward(dtype: str, folder: Path) -> None:
    """One request ends in every step, so that the number of rows falls from 256 to 1."""
    lengths = [1 + 37 * index % 211 for index in range(MAX_ROWS)]
    specs = specs_of(lengths, [4 + index for index in range(MAX_ROWS - 1)] + [MAX_ROWS + 8])

    reported, replayed, captured = run_together(folder, specs, dtype)

    assert replayed == {key for key in captured if not key[1]}
    assert max_error(reported, specs, NaiveModel(folder, device="cuda")) < MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_every_batch_size_of_long_contexts_decodes_like_a_full_forward(
    dtype: str, folder: Path
) -> None:
    """Up to 8 rows have long contexts, next to rows with short ones. The first request becomes long
    while it decodes.
    """
    lengths = [LONG_CONTEXT - 20, 1, 4000, 2300, 900, 3000, 2049, 17]
    specs = specs_of(lengths, [60, 8, 16, 24, 12, 20, 28, 30])

    reported, replayed, captured = run_together(folder, specs, dtype)

    assert replayed >= {key for key in captured if key[1]}
    assert max_error(reported, specs, NaiveModel(folder, device="cuda")) < MAX_ERROR[dtype]
