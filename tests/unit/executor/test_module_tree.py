"""Which models the fused step supports, and that joining weights leaves a model's
results unchanged.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch

from penstock.executor.torch.fused_weights import fuse_weights
from penstock.executor.torch.loading import LoadedModel, load_model
from penstock.executor.torch.module_tree import NotFused, read_module_tree
from penstock.executor.torch.whole_sequence import module_logits, trial_tokens
from support.torch_models import save_tiny_model


def load(name: str, folder: Path) -> LoadedModel:
    return load_model(save_tiny_model(name, folder), device="cpu", dtype="auto")


@pytest.mark.parametrize("name", ["llama", "llama_tied_no_groups", "qwen2", "qwen3", "mistral"])
def test_a_tree_of_the_family_is_read(name: str, tmp_path: Path) -> None:
    tree = read_module_tree(load(name, tmp_path))

    assert len(tree.layers) == 2
    assert (tree.num_heads, tree.head_dim) == (4, 16)
    assert tree.num_kv_heads == (4 if name == "llama_tied_no_groups" else 2)
    assert (tree.head is tree.embedding) == (name == "llama_tied_no_groups")
    assert (tree.layers[0].query_norm is not None) == (name == "qwen3")
    assert (tree.layers[0].qkv[0].bias is not None) == (name == "qwen2")
    assert tree.layers[0].window == 0


def test_a_window_is_read_from_what_the_layer_asks(tmp_path: Path) -> None:
    tree = read_module_tree(load("mistral_window", tmp_path))

    assert [layer.window for layer in tree.layers] == [32, 32]


@pytest.mark.parametrize(("name", "reason"), [("gemma2", "cap"), ("gemma3", "other than SiLU")])
def test_a_foreign_tree_is_rejected_by_what_is_foreign(
    name: str, reason: str, tmp_path: Path
) -> None:
    model = load(name, tmp_path)

    with pytest.raises(NotFused, match=reason):
        read_module_tree(model)


def test_a_parameter_without_a_place_rejects_the_model(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    attention = model.module.get_submodule("model.layers.1.self_attn")
    attention.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))

    with pytest.raises(NotFused, match=r"self_attn\.sinks"):
        read_module_tree(model)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@torch.inference_mode()
def test_joined_weights_lie_in_memory_once_and_the_modules_compute_the_same(
    name: str, tmp_path: Path
) -> None:
    model = load(name, tmp_path)
    tree = read_module_tree(model)
    ids = trial_tokens(tree.embedding, 24)
    before = module_logits(model, ids)

    layers = fuse_weights(tree)

    assert torch.equal(module_logits(model, ids), before)
    for fused, layer in zip(layers, tree.layers, strict=True):
        assert fused.qkv.weight.shape == ((4 + 2 * 2) * 16, 64)
        for linears, joined in ((layer.qkv, fused.qkv), (layer.gate_up, fused.gate_up)):
            storage = joined.weight.untyped_storage().data_ptr()
            assert {linear.weight.untyped_storage().data_ptr() for linear in linears} == {storage}
