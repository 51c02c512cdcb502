"""When the logits of a fused step count as equal to the model's."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch

from penstock.executor.torch.quantised_weights import FP8
from penstock.executor.torch.trial_reference import TrialReference

EXACT = torch.randn(24, 500, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(24, 500, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("rounding", "noise", "factor", "stored", "fault"),
    [
        (0.03, 0.05, 1.0, torch.bfloat16, ""),
        (0.03, 0.07, 1.0, torch.bfloat16, "differ .* by 7.*, over 6"),
        (0.001, 0.008, 1.0, torch.bfloat16, ""),
        (0.2, 0.16, 1.0, torch.bfloat16, "over 1.5e-01"),
        (0.03, 0.0, 1.03, torch.bfloat16, "by a factor of 1.03"),
        (0.03, 0.2, 1.0, torch.int8, ""),
        (0.03, 0.35, 1.0, torch.int8, "over 3.0e-01"),
        (0.03, 0.0, 0.9, torch.int8, "by a factor of 0.9"),
        (0.002, 0.35, 1.0, FP8, "over 3.0e-01"),
    ],
)
def test_the_bound_is_what_the_number_format_explains(
    rounding: float, noise: float, factor: float, stored: torch.dtype, fault: str
) -> None:
    reference = TrialReference(logits=EXACT, rounding=rounding, dtype=torch.bfloat16)
    # The result has the norm of the exact logits.
    found = (EXACT + noise * NOISE) / (1 + noise**2) ** 0.5

    reported = reference.fault_of(factor * found, stored)

    assert re.search(fault or "^$", reported)


def test_logits_that_are_not_finite_are_reported() -> None:
    reference = TrialReference(logits=EXACT, rounding=0.03, dtype=torch.bfloat16)
    found = EXACT.clone()
    found[3, 3] = torch.nan

    assert reference.fault_of(found, FP8) == "its logits are not finite"
