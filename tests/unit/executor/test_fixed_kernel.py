"""After the first launch of its kernel, `FixedKernel` launches it directly, without Triton's
launcher. The tests run on CUDA or in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from penstock.executor.torch.cuda.fixed_kernel import FixedKernel
from penstock.executor.torch.cuda.kernels import glue
from unit.executor.triton_device import DEVICE, IS_INTERPRETED

KERNELS: Any = glue
WIDTH = 32


def norm_kernel() -> FixedKernel:
    return FixedKernel(
        KERNELS.add_norm,
        has_added=False,
        has_scales=False,
        has_bias=False,
        is_quantised=False,
        hidden=WIDTH,
        width=WIDTH,
        num_warps=1,
    )


def normed(kernel: FixedKernel, x: torch.Tensor, eps: float) -> torch.Tensor:
    weight, out = torch.full((WIDTH,), 3.0, device=DEVICE), torch.full_like(x, float("nan"))
    kernel.launch((len(x), 1, 1), (x, x, x, x, x, weight, out, x), eps)
    return out


def expected(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * 3.0


@pytest.mark.parametrize("first", [0, 3])
def test_every_launch_has_its_own_tensors_and_numbers(first: int) -> None:
    kernel = norm_kernel()
    for offset, rows, eps in ((first, 2, 1.0), (0, 5, 0.1), (1, 1, 2.0), (0, 3, 0.0)):
        x = torch.randn(rows * WIDTH + offset, device=DEVICE)[offset:].view(rows, WIDTH)

        assert torch.allclose(normed(kernel, x, eps), expected(x, eps), atol=1e-5)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not compile")
def test_later_launches_are_direct() -> None:
    kernel = norm_kernel()
    x = torch.randn(4, WIDTH, device=DEVICE)
    normed(kernel, x, 1.0)
    kernel._kernel = None

    assert torch.allclose(normed(kernel, x, 0.5), expected(x, 0.5), atol=1e-5)


class SpecialisedKernel:
    """A kernel with an integer parameter that Triton may compile in as a constant."""

    params = tuple(SimpleNamespace(name=name, do_not_specialize=False) for name in ("x", "count"))

    def __getitem__(self, grid: object) -> Callable[..., object]:
        return lambda *_: self


def test_an_integer_that_is_compiled_in_is_rejected() -> None:
    with pytest.raises(TypeError, match="count must be do_not_specialize"):
        FixedKernel(SpecialisedKernel()).launch((1, 1, 1), (torch.ones(32),), 16)
