"""The compiled kernels sample exactly as PyTorch does: with the same thresholds, random numbers and
order of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch
from torch import Tensor

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels import kernels, native_sampling
from penstock.executor.torch.cpu_kernels.native import is_supported
from penstock.executor.torch.cpu_kernels.native_sampling import (
    SAMPLING_OPTIONS,
    choose_greatest,
    draw_rows,
)
from penstock.executor.torch.inverse_cdf import draw, draw_truncated
from penstock.executor.torch.truncation import Truncation

NUM_ROWS = 200


@pytest.fixture(autouse=True, params=[*filter(is_supported, INSTRUCTION_SETS)])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test with each instruction set of this processor."""
    monkeypatch.setattr(kernels, "_chosen", request.param)
    native_sampling._functions.cache_clear()
    chosen, _ = native_sampling._loaded()
    assert chosen.instructions == request.param
    yield
    native_sampling._functions.cache_clear()


def in_torch(logits: Tensor, options: np.ndarray) -> Tensor:
    logits = logits.float()
    scores = logits - logits.amax(1, keepdim=True)
    scores /= torch.from_numpy(options["temperature"].copy())[:, None]
    uniforms = torch.from_numpy(options["uniform"].copy())
    truncation = Truncation(
        top_k=torch.from_numpy(options["top_k"].astype(np.int64)),
        top_p=torch.from_numpy(options["top_p"].astype(np.float64)),
        min_p=torch.from_numpy(options["min_p"].astype(np.float64)),
    )
    is_cut = (options["top_k"] > 0) | (options["top_p"] < 1) | (options["min_p"] > 0)
    plain, cut = draw(scores, uniforms), draw_truncated(scores, uniforms, truncation)
    return torch.where(torch.from_numpy(is_cut), cut, plain)


@pytest.mark.parametrize("vocab_size", [5, 96, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.2, 4.0])
@torch.inference_mode()
def test_any_mix_of_options_draws_what_torch_draws(
    vocab_size: int, dtype: torch.dtype, spread: float
) -> None:
    random = np.random.default_rng(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    # Rounded to bfloat16 there are many ties, and a few tokens are excluded.
    logits = (torch.randn(NUM_ROWS, vocab_size, generator=generator) * spread).to(dtype)
    logits[::3, 1:4] = -math.inf
    options = np.zeros(NUM_ROWS, dtype=SAMPLING_OPTIONS)
    options["temperature"] = random.choice([1e-4, 0.5, 1.0, 3.0], NUM_ROWS)
    options["top_k"] = random.choice([0, 1, 4, 40, vocab_size, vocab_size + 9], NUM_ROWS)
    options["top_p"] = random.choice([1.0, 0.01, 0.5, 0.95], NUM_ROWS)
    options["min_p"] = random.choice([0.0, 0.02, 1.0], NUM_ROWS)
    options["uniform"] = random.random(NUM_ROWS)
    options["uniform"][:4] = (0.0, 0.0, 1 - 2**-53, 1 - 2**-53)

    chosen = draw_rows(logits, np.arange(NUM_ROWS), options)

    assert chosen.is_good.all()
    # A number within the rounding of a boundary may fall on either side.
    assert (chosen.tokens != in_torch(logits, options).numpy()).sum() <= 1


def test_rows_are_sampled_by_index_and_those_not_finite_are_reported() -> None:
    logits = torch.full((4, 40), -math.inf)
    logits[0, 7] = logits[2, 9] = 1.0
    logits[1, 3] = math.nan
    options = np.zeros(4, dtype=SAMPLING_OPTIONS)
    options["temperature"], options["top_p"] = 1.0, 0.9

    chosen = draw_rows(logits, np.array([2, 1, 3, 0]), options)
    greatest = choose_greatest(logits)

    assert chosen.tokens.tolist() == [9, 0, 0, 7]
    assert chosen.is_good.tolist() == [True, False, False, True]
    assert greatest.is_good.tolist() == [True, False, True, False]
    assert greatest.tokens[[0, 2]].tolist() == [7, 9]
    with pytest.raises(IndexError, match="row"):
        draw_rows(logits, np.array([4]), options[:1])
