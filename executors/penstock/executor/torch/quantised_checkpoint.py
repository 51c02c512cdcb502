"""Reads checkpoints with 8-bit linear layers: compressed-tensors and ModelOpt.

Both store e4m3 weights (compressed-tensors also int8) as `NAME.weight` with `NAME.weight_scale`,
one scale per tensor or per output channel. Scales of activations and of the KV cache are ignored:
the executor computes its own. The functions raise UnsupportedModel naming an unsupported feature of
a checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel
from penstock.executor.torch.quantisation_settings import CONFIG, FILE, quantisation_method

_EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SCALE = ".weight_scale"
_OTHER_SCALES = (".input_scale", ".k_scale", ".v_scale", ".output_scale")
_UNREAD = {
    ".weight_zero_point": "zero points are not read",
    ".pre_quant_scale": "scales of inputs are not read",
}


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
    """Return whether a folder names a quantisation method, compressed-tensors or ModelOpt.
    `config`: its transformers configuration.

    Raises UnsupportedModel for a quantised folder in another format.
    """
    return quantisation_method(path, config) is not None


def check_not_quantised(path: Path) -> None:
    """Raise UnsupportedModel naming a quantised tensor of a folder that names no quantisation
    method, since its scale would be ignored.
    """
    for name, tensor in _mapped(path).items():
        is_narrow = tensor.dtype not in _WIDE and (
            tensor.dtype.is_floating_point or name.endswith(".weight")
        )
        if is_narrow or name.endswith(_SCALE):
            raise UnsupportedModel(
                f"{name} ({_named(tensor.dtype)}) is of a quantised model, and the folder has"
                f" neither {CONFIG} in config.json nor {FILE}"
            )


def read_quantised(path: Path, config: Any, dtype: torch.dtype | None) -> QuantisedCheckpoint:
    """Memory-map all tensors of a folder. `dtype` None: the configuration's dtype, else bfloat16.

    Raises ModelLoadError for an 8-bit weight without a valid scale, UnsupportedModel for an
    unsupported format.
    """
    if dtype is None:
        named: Any = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        dtype = named if isinstance(named, torch.dtype) else torch.bfloat16
    raw = _mapped(path)
    stored: dict[str, StoredWeight] = {}
    tensors: dict[str, Tensor] = {}
    unread = torch.tensor(torch.nan, dtype=dtype)
    for name, tensor in raw.items():
        if name.endswith((_SCALE, *_OTHER_SCALES)):
            continue
        _check_tensor(name, tensor)
        if tensor.dtype in _WIDE:
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        stored[module] = _stored(module, tensor, raw.get(f"{module}{_SCALE}"))
        tensors[name] = unread.expand(tensor.shape)
    for name in raw:
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) not in stored:
            raise UnsupportedModel(f"{name} has no weight in 8 bits")
    return QuantisedCheckpoint(tensors=tensors, stored=stored, dtype=dtype)


def _mapped(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors


def _check_tensor(name: str, tensor: Tensor) -> None:
    for suffix, reason in _UNREAD.items():
        if name.endswith(suffix):
            raise UnsupportedModel(f"{name}: {reason}")
    if tensor.dtype not in (*_EIGHT_BITS, *_WIDE):
        raise UnsupportedModel(
            f"{name} is stored in {_named(tensor.dtype)}: 8-bit weights are read in"
            f" {' and '.join(map(_named, _EIGHT_BITS))}"
        )


def _stored(module: str, values: Tensor, scale: Tensor | None) -> StoredWeight:
    if scale is None:
        raise ModelLoadError(f"{module}.weight is in 8 bits and has no {module}{_SCALE}")
    scale = scale.float().flatten()
    if scale.numel() not in (1, values.shape[0]):
        raise UnsupportedModel(f"{module}{_SCALE}: {scale.numel()} scales for a weight")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ModelLoadError(f"{module}{_SCALE} has scales that are not finite and above 0")
    return StoredWeight(values=values, scale=scale.expand(values.shape[0]).contiguous())


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
