"""Tiny models as folders in the 8-bit formats that the torch executor reads."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.executor.torch.quantised_weights import quantise
from support.torch_models import save_tiny_model

FORMS = ("compressed-tensors", "modelopt")
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


def save_quantised_model(
    name: str,
    folder: Path,
    *,
    form: str,
    kind: str = "fp8",
    dtype: torch.dtype = torch.float32,
    **changes: float,
) -> Path:
    """Write the model of `save_tiny_model` with the linear weights of its layers in 8 bits; return
    the folder. `form`: one of FORMS; compressed-tensors has a scale per channel, modelopt one per
    tensor.
    """
    save_tiny_model(name, folder, dtype, **changes)
    store_quantised(folder, is_channelwise=form == "compressed-tensors", kind=kind)
    if form == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    else:
        change_config(folder, quantization_config=COMPRESSED)
    return folder


def store_quantised(folder: Path, *, is_channelwise: bool, kind: str = "fp8") -> None:
    """Quantise the linear weights of the layers in the folder's model.safetensors."""
    tensors = load_tensors(folder)
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name].float()
        values, scale = quantise(weight if is_channelwise else weight.view(1, -1), kind)
        tensors[name] = values.view(weight.shape)
        tensors[f"{name}_scale"] = scale[:, None] if is_channelwise else scale[0]
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
    save_tensors(folder, tensors)


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def load_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
