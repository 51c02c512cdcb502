"""A sample of the architecture sweep, which checks all model types."""

from __future__ import annotations

import pytest

from models.check import check_architecture

EXACT = ("llama", "gpt_oss", "gemma2", "qwen2", "gpt2", "opt")
REJECTED = {
    "bart": "position_ids",
    "roberta": "positions from 0",
    "falcon": "attention interface",
    "bloom": "max_position_embeddings",
    "mamba": "linear_attention",
    "qwen2_moe": "hide their window",
    "diffllama": "more than once",
}


@pytest.mark.parametrize("model_type", EXACT)
def test_the_engine_computes_what_the_model_computes_alone(model_type: str) -> None:
    verdict = check_architecture(model_type)

    assert (verdict.outcome, verdict.detail) == ("exact", "")
    assert verdict.largest_error < 1e-3


@pytest.mark.parametrize("model_type", REJECTED)
def test_a_rejection_names_the_type_and_the_reason(model_type: str) -> None:
    verdict = check_architecture(model_type)

    assert verdict.outcome == "rejected"
    assert model_type in verdict.detail
    assert REJECTED[model_type] in verdict.detail


def test_a_hidden_window_bounds_the_length() -> None:
    verdict = check_architecture("phimoe")

    assert verdict.outcome == "exact"
    assert "32" in verdict.detail


def test_a_type_that_cannot_be_built_is_a_result() -> None:
    assert check_architecture("musicgen").outcome == "not buildable"
