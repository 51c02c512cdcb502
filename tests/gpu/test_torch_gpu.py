"""Runs the differential tests of the torch executor on a CUDA device; skipped without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.inverse_cdf import draw, draw_truncated
from penstock.executor.torch.truncation import Truncation
from penstock.scheduler.request import SamplingParams
from support.core import outputs
from support.torch_differential import (
    AMPLE_BLOCKS,
    FEATURE_SETS,
    NUM_SLOTS,
    FeatureSet,
    check_feature_set,
    mixed_specs,
    run_mixed,
)
from support.torch_models import ARCHITECTURES, NaiveModel, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return save_tiny_model(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def naive(folder: Path) -> NaiveModel:
    return NaiveModel(folder, device="cuda")


def make_executor(path: Path, num_blocks: int = AMPLE_BLOCKS, dtype: str = "auto") -> TorchExecutor:
    return TorchExecutor(
        ExecutorConfig(
            model_path=path,
            device="cuda",
            dtype=dtype,
            max_num_seqs=NUM_SLOTS,
            num_blocks=num_blocks,
        )
    )


@pytest.mark.parametrize("way", FEATURE_SETS, ids=str)
def test_cuda_equals_a_full_forward(way: FeatureSet, folder: Path, naive: NaiveModel) -> None:
    check_feature_set(way, lambda blocks: make_executor(folder, blocks), naive)


def test_a_seed_gives_the_same_tokens_in_any_batch_on_cuda(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11)
    specs = mixed_specs(hashed=False, sampling=sampling)

    together = outputs(run_mixed(make_executor(folder), specs, budget=24))
    alone: dict[int, list[int]] = {}
    for spec in specs:
        alone |= outputs(run_mixed(make_executor(folder), [spec], budget=2048))

    assert alone == together


def test_half_precision_gives_the_reference_tokens_and_logprobs(folder: Path) -> None:
    sampling = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias=((5, 2.0), (9, -3.0)),
        num_logprobs=3,
        num_prompt_logprobs=2,
    )
    specs = mixed_specs(hashed=False, sampling=sampling)

    reported = run_mixed(make_executor(folder, dtype="bfloat16"), specs, budget=64)

    assert {key: len(tokens) for key, tokens in outputs(reported).items()} == {
        spec.key: spec.max_tokens for spec in specs
    }
    logprobs = [events.logprobs for events in reported if events.logprobs is not None]
    assert sum(len(part.chosen) for part in logprobs) == sum(spec.max_tokens for spec in specs)
    assert all((part.chosen <= 0).all() and (part.ranks >= 1).all() for part in logprobs)


def test_cuda_draws_the_tokens_that_the_cpu_draws() -> None:
    random = np.random.default_rng(2)
    scores = torch.from_numpy(random.normal(0, 3, (256, 5000)).astype(np.float32))
    scores = scores - scores.max(1, keepdim=True).values
    numbers = torch.from_numpy(random.random(256))
    truncation = Truncation(
        top_k=torch.from_numpy(random.integers(0, 2000, 256)),
        top_p=torch.from_numpy(random.uniform(0.2, 1.0, 256)),
        min_p=torch.from_numpy(random.uniform(0.0, 0.01, 256)),
    )
    on_cuda = Truncation(
        top_k=truncation.top_k.cuda(),
        top_p=truncation.top_p.cuda(),
        min_p=truncation.min_p.cuda(),
    )

    plain = draw(scores.cuda(), numbers.cuda()).cpu()
    truncated = draw_truncated(scores.cuda(), numbers.cuda(), on_cuda).cpu()

    assert torch.equal(plain, draw(scores, numbers))
    assert torch.equal(truncated, draw_truncated(scores, numbers, truncation))
