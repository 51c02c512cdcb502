"""A part of the architecture sweep. The whole sweep checks all model types."""

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
    result = check_architecture(model_type)

    assert (result.outcome, result.detail) == ("exact", "")
    assert result.largest_error < 1e-3


@pytest.mark.parametrize("model_type", REJECTED)
def test_a_rejection_names_the_type_and_the_reason(model_type: str) -> None:
    result = check_architecture(model_type)

    assert result.outcome == "rejected"
    assert model_type in result.detail
    assert REJECTED[model_type] in result.detail


def test_a_hidden_window_bounds_the_length() -> None:
    result = check_architecture("phimoe")

    assert result.outcome == "exact"
    assert "32" in result.detail


def test_a_type_that_cannot_be_built_is_a_result() -> None:
    assert check_architecture("musicgen").outcome == "not buildable"
