"""Checkpoints in 8 bits are read as stored; unsupported ones are rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel
from penstock.executor.torch.loading import load_model
from penstock.executor.torch.quantised_weights import quantise
from support.torch_models import save_tiny_model

COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}
MODELOPT: dict[str, Any] = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}


def store_quantised(folder: Path, *, is_channelwise: bool) -> None:
    """Quantise the linears of the layers in the folder's own file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "_proj.weight" in name]:
        values, scale = quantise(tensors[name].float(), "fp8")
        if not is_channelwise:
            scale = tensors[name].float().abs().amax() / 448.0
            values = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[name] = values
        tensors[f"{name}_scale"] = scale[:, None] if is_channelwise else scale
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_a_checkpoint_is_read_as_it_is_stored(form: str, folder: Path) -> None:
    plain = load_model(folder, device="cpu", dtype="float32")
    store_quantised(folder, is_channelwise=form == "compressed-tensors")
    if form == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    else:
        change_config(folder, quantization_config=COMPRESSED)

    model = load_model(folder, device="cpu", dtype="float32")

    name = "model.layers.1.mlp.down_proj"
    linear: Any = model.module.get_submodule(name)
    stored = model.stored[linear]
    assert stored.values.dtype == torch.float8_e4m3fn
    assert torch.equal(stored.values.float() * stored.scale[:, None], linear.weight)
    before: Any = plain.module.get_submodule(name)
    assert float((linear.weight - before.weight).norm() / before.weight.norm()) < 0.04
    assert len(model.stored) == 7 * len(list(model.module.get_submodule("model.layers").children()))


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"num_bits": 4}, "4 bits"),
        ({"strategy": "block"}, "strategy block"),
        ({"symmetric": False}, "zero points"),
        (None, r"config_groups\.group_0\.weights must be an object"),
    ],
)
def test_what_is_not_read_is_named(
    weights: dict[str, Any] | None, reason: str, folder: Path
) -> None:
    group = COMPRESSED["config_groups"]["group_0"]
    group = group | {"weights": None if weights is None else group["weights"] | weights}
    change_config(folder, quantization_config=COMPRESSED | {"config_groups": {"group_0": group}})

    with pytest.raises(UnsupportedModel, match=reason):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
        {"quant_method": "foo"},
        {"load_in_8bit": True},
    ],
    ids=lambda settings: str(settings.get("quant_method")),
)
def test_another_method_is_refused_by_its_name(settings: dict[str, Any], folder: Path) -> None:
    change_config(folder, quantization_config=settings)

    named = f"quant_method {settings.get('quant_method')}: compressed-tensors and modelopt alone"
    with pytest.raises(UnsupportedModel, match=named):
        load_model(folder, device="cpu", dtype="float32")


def test_stored_zero_points_are_refused(folder: Path) -> None:
    store_quantised(folder, is_channelwise=True)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight_zero_point"
    save_file(
        tensors | {name: torch.zeros(64, 1, dtype=torch.int8)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    change_config(folder, quantization_config=COMPRESSED)

    with pytest.raises(UnsupportedModel, match="weight_zero_point: zero points are not read"):
        load_model(folder, device="cpu", dtype="float32")


def test_another_algorithm_of_modelopt_is_refused(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')

    with pytest.raises(UnsupportedModel, match="NVFP4"):
        load_model(folder, device="cpu", dtype="float32")


def test_a_weight_without_its_scale_is_named(folder: Path) -> None:
    store_quantised(folder, is_channelwise=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=COMPRESSED)

    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.q_proj\.weight_scale"):
        load_model(folder, device="cpu", dtype="float32")
