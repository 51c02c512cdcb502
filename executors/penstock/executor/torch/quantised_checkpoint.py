"""Reads checkpoints with 8-bit linear layers: compressed-tensors and ModelOpt.

Both store e4m3 weights (compressed-tensors also int8) as `NAME.weight` with `NAME.weight_scale`,
one scale per tensor or per output channel. Scales of activations and of the KV cache are ignored:
the executor computes its own. The functions raise UnsupportedModel naming an unsupported feature of
a checkpoint.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel

_METHODS = ("compressed-tensors", "modelopt")
_STRATEGIES = ("tensor", "channel")
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_ZERO_POINT = ".weight_zero_point"
_SCALES = (".weight_scale", ".input_scale", ".k_scale", ".v_scale", ".output_scale")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredWeight:
    """A weight of a checkpoint: `values` [out, in] in 8 bits, `scale` float32 [out]."""

    values: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisedCheckpoint:
    """The memory-mapped tensors of a checkpoint.

    `tensors`: every parameter by name; a quantised one is represented by NaN, one element expanded
    to its shape. `stored`: the quantised weights by module name. `dtype`: the dtype of the model.
    """

    tensors: dict[str, Tensor]
    stored: dict[str, StoredWeight]
    dtype: torch.dtype


def is_quantised(path: Path, config: Any) -> bool:
    """Return whether a folder names one of the two quantisation methods; `read_quantised` checks
    the number format. `config`: its transformers configuration.

    Raises UnsupportedModel for a quantised folder in another format.
    """
    return _method(path, config) is not None


def read_quantised(path: Path, config: Any, dtype: torch.dtype | None) -> QuantisedCheckpoint:
    """Memory-map all tensors of a folder. Raises ModelLoadError for an 8-bit weight without a
    scale, UnsupportedModel for an unsupported format. `dtype` None: the configuration's dtype, else
    bfloat16.
    """
    _check(path, config)
    if dtype is None:
        named: Any = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        dtype = named if isinstance(named, torch.dtype) else torch.bfloat16
    raw: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            raw.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    stored: dict[str, StoredWeight] = {}
    tensors: dict[str, Tensor] = {}
    unread = torch.tensor(torch.nan, dtype=dtype)
    for name, tensor in raw.items():
        if name.endswith(_SCALES):
            continue
        if name.endswith(_ZERO_POINT):
            raise UnsupportedModel(f"{name}: zero points are not read")
        if tensor.dtype not in (torch.float8_e4m3fn, torch.int8):
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        stored[module] = _stored(module, tensor, raw.get(f"{module}.weight_scale"))
        tensors[name] = unread.expand(tensor.shape)
    return QuantisedCheckpoint(tensors=tensors, stored=stored, dtype=dtype)


def _stored(module: str, values: Tensor, scale: Tensor | None) -> StoredWeight:
    if scale is None:
        raise ModelLoadError(f"{module}.weight is in 8 bits and has no {module}.weight_scale")
    scale = scale.float().flatten()
    if scale.numel() not in (1, values.shape[0]):
        raise UnsupportedModel(f"{module}.weight_scale: {scale.numel()} scales for a weight")
    return StoredWeight(values=values, scale=scale.expand(values.shape[0]).contiguous())


def _method(path: Path, config: Any) -> str | None:
    settings = _settings(config)
    method = settings.get("quant_method")
    if method in _METHODS:
        return cast("str", method)
    if method is None and (path / "hf_quant_config.json").is_file():
        return "modelopt"
    if settings:
        raise UnsupportedModel(
            f"quantization_config.quant_method {method}: {' and '.join(_METHODS)} alone are read"
        )
    return None


def _check(path: Path, config: Any) -> None:
    if _method(path, config) == "compressed-tensors":
        groups: Mapping[str, Any] = _settings(config).get("config_groups") or {}
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            _check_group(f"quantization_config.config_groups.{name}.weights", weights)
        return
    settings = _settings(config)
    file = path / "hf_quant_config.json"
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8")).get("quantization", {})
    algorithm = settings.get("quant_algo")
    if algorithm not in _MODELOPT_ALGORITHMS:
        raise UnsupportedModel(f"ModelOpt's quant_algo {algorithm}: only FP8 is supported")


def _check_group(name: str, weights: object) -> None:
    if not isinstance(weights, Mapping):
        raise UnsupportedModel(f"{name} must be an object with the weights' 8-bit format")
    weights = cast("Mapping[str, Any]", weights)
    if weights.get("num_bits") != 8:
        raise UnsupportedModel(f"{name}: {weights.get('num_bits')} bits; only 8 are supported")
    if weights.get("strategy") not in _STRATEGIES:
        raise UnsupportedModel(f"{name}: strategy {weights.get('strategy')}, not tensor or channel")
    if not weights.get("symmetric", True):
        raise UnsupportedModel(f"{name}: zero points are not read")


def _settings(config: Any) -> Mapping[str, Any]:
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    return cast("Mapping[str, Any]", found if isinstance(found, dict) else found.to_dict())
