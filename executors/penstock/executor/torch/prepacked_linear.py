"""Linear layers in bfloat16 whose weights are packed once, instead of in every call.

Packs weights for the compiled kernels or for oneDNN. PyTorch's operators for oneDNN are private, so
they are tested at start. With packed weights, small products are faster and have the same results
up to rounding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.torch.cpu_kernels.kernels import Kernels, load
from penstock.executor.torch.cpu_kernels.packed_linear import PackedLinear
from penstock.executor.torch.cpu_kernels.packed_matrix import can_pack

_PACKED_ROWS = 64
"""Batch size that the layout is optimised for; every batch size works."""


def _pack(weight: Tensor) -> Tensor:
    reorder: Any = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - tried at start
    packed: Tensor = reorder(weight, _PACKED_ROWS)
    return packed


def _apply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    linear: Any = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - tried at start
    out: Tensor = linear.default(x, packed, bias, "none", [], "")
    return out


def can_prepack() -> bool:
    """Return True if the private operators exist and give the results of the ordinary product, up
    to rounding.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(torch.bfloat16)
    bias = torch.randn(48, generator=generator).to(torch.bfloat16)
    x = torch.randn(1, 3, 32, generator=generator).to(torch.bfloat16)
    try:
        packed = _apply(x, _pack(weight), bias)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return False
    expected = nn.functional.linear(x, weight, bias)
    return packed.shape == expected.shape and bool(
        torch.allclose(packed.float(), expected.float(), rtol=0.02, atol=0.02)
    )


class PrepackedLinear:
    """Computes x @ weight^T + bias with a packed copy of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _pack(weight.detach())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., in]; return [..., out]."""
        return _apply(x, self._packed, self._bias)


def uses_compiled_bf16(kernels: Kernels) -> bool:
    """Return whether bfloat16 linear layers use `kernels` instead of oneDNN: True if the kernels
    are at least as fast, or if they are compiled and oneDNN cannot prepack on this machine.
    """
    return kernels.has_fast_bf16_linear or (kernels.is_native and not can_prepack())


def _packing() -> Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]] | None:
    kernels = load()
    if uses_compiled_bf16(kernels):
        return partial(PackedLinear, kernels, dtype=torch.bfloat16)
    return PrepackedLinear if can_prepack() else None


def freed_weight(weight: Tensor) -> Tensor:
    """Return a placeholder with the shape and dtype of a weight whose memory is freed. Products
    with it are NaN, so that a mistaken use fails instead of giving a wrong result.
    """
    return weight.new_full((1,), torch.nan).expand(weight.shape)


def prepack_linears(model: nn.Module) -> int:
    """Pack the bfloat16 linear layers of a model on the CPU in place; return their number. Skips
    layers that the model requires in float32 and shapes that cannot be packed.

    The unpacked weight is freed, unless another kind of module shares it, such as a tied embedding.
    """
    pack = _packing()
    if pack is None:
        return 0
    # Only bfloat16: a model may read its float32 weights directly, as LongCat-Flash does with its
    # router's.
    kept = [
        part
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for part in getattr(model, name, None) or ()
    ]
    linears = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(part in f"{name}.weight" for part in kept)
    ]
    linears = [layer for layer in linears if layer.weight.dtype == torch.bfloat16]
    linears = [layer for layer in linears if can_pack(layer.in_features, torch.bfloat16)]
    others = {
        parameter.untyped_storage().data_ptr()
        for module in model.modules()
        if type(module) is not nn.Linear
        for parameter in module.parameters(recurse=False)
    }
    packed_of: dict[int, Callable[[Tensor], Tensor]] = {}
    for layer in linears:
        storage = layer.weight.untyped_storage().data_ptr()
        forward = packed_of.get(id(layer.weight)) or pack(
            layer.weight, getattr(layer, "bias", None)
        )
        packed_of[id(layer.weight)] = forward
        vars(layer)["forward"] = forward
        if storage not in others:
            layer.weight.data = freed_weight(layer.weight.detach())
    return len(linears)
