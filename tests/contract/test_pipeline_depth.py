"""A pipeline of depth 2 gives the same results as depth 1 for every sampling option.

At depth 2 the scheduler's arrays lack the token of the step that is not collected yet. Every
sampling option that depends on a position, a length or earlier tokens is tested.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.scheduler.request import RequestSpec, SamplingParams
from penstock.scheduler.slot_arrays import SlotArrays
from support.core import BLOCK_SIZE, make_spec
from support.executor_runs import MAX_SEQ_LEN, CheckedExecutor, Harness, Outcome

# An executor that computes at once, behind a pipeline of depth 2: it reads tokens that are one step
# old.


class LateArrays:
    """Forwards batches to an executor at depth 2; in their arrays, the tokens of the uncollected
    step are missing.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_lagging = 0
        """Rows that ran before their last token was collected."""
        self._results: deque[StepResult] = deque()
        self._drawn: dict[int, int] = {}

    @property
    def info(self) -> ExecutorInfo:
        return replace(self.inner.info, pipeline_depth=2)

    @property
    def ready_fd(self) -> int | None:
        return None

    def launch(self, batch: Batch) -> None:
        arrays = _copied(batch.arrays)
        last = batch.starts + batch.num_tokens - 1
        lagging = np.flatnonzero(last >= arrays.num_tokens[batch.slots])
        self.num_lagging += len(lagging)
        for row in lagging.tolist():
            slot = int(batch.slots[row])
            arrays.token_ids[slot, last[row]] = self._drawn[slot]
        self.inner.launch(replace(batch, arrays=arrays))
        result = self.inner.collect()
        self._drawn |= dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True))
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self.inner.close()


def _copied(arrays: SlotArrays) -> SlotArrays:
    copied = copy.copy(arrays)
    copied.token_ids = arrays.token_ids.copy()
    return copied


torch = pytest.importorskip("torch")

VOCAB = 96
DRAWN = SamplingParams(temperature=1.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "temperature": {"sampling": replace(DRAWN, temperature=1.7)},
    "top_k": {"sampling": replace(DRAWN, top_k=5)},
    "top_p": {"sampling": replace(DRAWN, top_p=0.7)},
    "min_p": {"sampling": replace(DRAWN, min_p=0.05)},
    "repetition_penalty": {"sampling": replace(DRAWN, repetition_penalty=1.6)},
    "presence_penalty": {"sampling": replace(DRAWN, presence_penalty=1.5)},
    "frequency_penalty": {"sampling": SamplingParams(temperature=0.0, frequency_penalty=1.5)},
    "logit_bias": {"sampling": replace(DRAWN, logit_bias=((5, 4.0), (7, -50.0)))},
    "min_tokens": {
        "sampling": SamplingParams(temperature=0.0),
        "min_tokens": 5,
        "stop_ids": tuple(range(3, 35)),
    },
    "logprobs": {"sampling": replace(DRAWN, num_logprobs=3)},
    "prompt_logprobs": {"sampling": replace(DRAWN, num_prompt_logprobs=2)},
    "everything": {
        "sampling": replace(
            DRAWN,
            top_k=20,
            top_p=0.9,
            min_p=0.001,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.6,
            logit_bias=((5, 4.0), (7, -50.0)),
            num_logprobs=3,
            num_prompt_logprobs=2,
        ),
        "min_tokens": 5,
        "stop_ids": (5, 11),
    },
}
AMPLE_BLOCKS, SCARCE_BLOCKS = 64, 14
"""With AMPLE_BLOCKS no request is preempted; with SCARCE_BLOCKS some are."""


def on_cpu(depth: int, config: ExecutorConfig) -> Executor:
    executor = create_executor(replace(config, num_threads=1))
    return LateArrays(executor) if depth == 2 else executor


def on_cuda(depth: int, config: ExecutorConfig) -> Executor:
    return create_executor(replace(config, device="cuda", pipeline_depth=depth))


CASES = [
    pytest.param(on_cpu, id="torch"),
    pytest.param(
        on_cuda,
        id="torch-cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def crowd(fields: dict[str, Any]) -> list[RequestSpec]:
    """Return five requests of 1 to 21 prompt tokens that start and end at different steps."""
    sampling: SamplingParams = fields["sampling"]
    return [
        make_spec(
            key,
            [(7 * i + 5 * key) % 90 for i in range(1 + 5 * (key - 1))],
            max_tokens=6 + 3 * key,
            hashed=False,
            **{**fields, "sampling": replace(sampling, seed=key)},
        )
        for key in range(1, 6)
    ]


def outcomes_at(
    depth: int,
    make: Callable[..., Executor],
    folder: Path,
    specs: list[RequestSpec],
    num_blocks: int,
) -> list[Outcome]:
    config = ExecutorConfig(
        kind=ExecutorKind.TORCH,
        model_path=folder,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=3,
        max_seq_len=MAX_SEQ_LEN,
    )
    executor = make(depth, config)
    assert executor.info.pipeline_depth == depth
    try:
        return Harness(config).run(*specs, stagger=True, executor=CheckedExecutor(executor))
    finally:
        if isinstance(executor, LateArrays):
            assert executor.num_lagging > 20
        executor.close()


@pytest.mark.parametrize("num_blocks", [AMPLE_BLOCKS, SCARCE_BLOCKS])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("make", CASES)
def test_depth_2_gives_the_same_outputs_as_depth_1(
    make: Callable[..., Executor],
    option: str,
    num_blocks: int,
    make_tiny_llama: Callable[[int, int], Path],
) -> None:
    """With few blocks, requests are preempted, and their prompts then contain the tokens generated
    so far.
    """
    folder = make_tiny_llama(VOCAB, VOCAB - 1)
    specs = crowd(OPTIONS[option])

    one, two = (outcomes_at(depth, make, folder, specs, num_blocks) for depth in (1, 2))

    assert any(outcome.num_preemptions for outcome in two) == (num_blocks == SCARCE_BLOCKS)
    assert [outcome.tokens for outcome in two] == [outcome.tokens for outcome in one]
    assert [len(outcome.logprobs) for outcome in two] == [len(o.logprobs) for o in one]
    for late, early in zip(two, one, strict=True):
        for got, expected in zip(late.logprobs, early.logprobs, strict=True):
            np.testing.assert_allclose(got.chosen, expected.chosen, atol=1e-4)
            np.testing.assert_array_equal(got.top_ids, expected.top_ids)
        assert late.prompt_logprobs == pytest.approx(early.prompt_logprobs, abs=1e-4)
