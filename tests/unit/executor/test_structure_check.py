"""The structure check detects a model that computes something else than its module tree implies,
and leaves the model unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch
from transformers import AutoModelForCausalLM, Ministral3Config

from penstock.executor.torch.loading import LoadedModel, load_model
from penstock.executor.torch.module_tree import NotFused, read_module_tree
from penstock.executor.torch.structure_check import check_structure
from penstock.executor.torch.whole_sequence import module_logits
from support.torch_models import FUSED_SHAPES, HIDDEN_DIFFERENCES, save_tiny_model, tiny_config

DTYPES = ("float32", "bfloat16", "float16")
IDS = torch.arange(40, 64)


def load(name: str, folder: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(save_tiny_model(name, folder), device="cpu", dtype=dtype)


def addresses(model: LoadedModel) -> dict[str, tuple[torch.dtype, int]]:
    return {
        name: (value.dtype, value.data_ptr()) for name, value in model.module.named_parameters()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED_SHAPES)
def test_the_logits_are_those_of_the_same_weights_in_float32(
    name: str, dtype: str, tmp_path: Path
) -> None:
    model = load(name, tmp_path, dtype)
    before = addresses(model)

    found = check_structure(model, read_module_tree(model), IDS)

    assert addresses(model) == before
    model.module.float()
    with torch.inference_mode():
        expected = module_logits(model, IDS)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HIDDEN_DIFFERENCES)
def test_a_hidden_difference_is_named_in_every_number_format(
    name: str, dtype: str, tmp_path: Path
) -> None:
    model = load(name, tmp_path, dtype)
    before = addresses(model)

    with pytest.raises(NotFused, match=HIDDEN_DIFFERENCES[name]):
        check_structure(model, read_module_tree(model), IDS)

    assert addresses(model) == before
    with torch.inference_mode():
        assert torch.isfinite(module_logits(model, IDS)).all()


def test_queries_that_change_far_behind_the_first_positions_are_found(tmp_path: Path) -> None:
    shape = tiny_config("mistral").to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    heads = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    config = Ministral3Config(
        **{name: shape[name] for name in (*kept, *heads)},
        sliding_window=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 320,
            "llama_4_scaling_beta": 0.1,
        },
    )
    built: Any = AutoModelForCausalLM.from_config(config)
    built.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype="bfloat16")

    with pytest.raises(NotFused, match=r"in the queries of layer 0: by .* at position"):
        check_structure(model, read_module_tree(model), IDS)


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("model.layers.1.mlp", "the output of layer 1"),
        ("model.layers.1.input_layernorm", "the queries of layer 1"),
        ("model.layers.0", "the output of layer 0"),
        ("model.norm", "the logits"),
        ("lm_head", "the logits"),
        ("model.embed_tokens", "the embeddings"),
    ],
)
def test_a_factor_anywhere_is_found(part: str, what: str, tmp_path: Path) -> None:
    model = load("llama", tmp_path, "bfloat16")
    tree = read_module_tree(model)
    module: Any = model.module.get_submodule(part)
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs) * 1.01

    with pytest.raises(NotFused, match=what):
        check_structure(model, tree, IDS)


def test_running_out_of_memory_is_not_reported_as_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", tmp_path, "bfloat16")
    before = addresses(model)
    layer: Any = model.module.get_submodule("model.layers.1")

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer, "forward", fail)

    with pytest.raises(torch.OutOfMemoryError):
        check_structure(model, read_module_tree(model), IDS)

    assert addresses(model) == before
