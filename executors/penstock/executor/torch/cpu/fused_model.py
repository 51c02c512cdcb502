"""Joins the weights of the fused step on a CPU, and packs them for the matrix products.

"Joined" means that projections with a common input form one matrix. The modules keep views of the
joined matrices until `pack_model` packs them, in 8 bits if configured, layer by layer: at most one
layer's weights are in memory twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.executor.torch.cpu_kernels.kernels import Kernels
from penstock.executor.torch.cpu_kernels.packed_linear import PackedLinear
from penstock.executor.torch.cpu_kernels.packed_matrix import can_pack
from penstock.executor.torch.decoder_layer import DecoderLayer
from penstock.executor.torch.fused_weights import Projection, fuse_weights
from penstock.executor.torch.load_progress import LoadProgress
from penstock.executor.torch.module_tree import DecoderTree, LayerTree, NotFused
from penstock.executor.torch.prepacked_linear import (
    PrepackedLinear,
    can_prepack,
    freed_weight,
    uses_compiled_bf16,
)
from penstock.executor.torch.rotary_table import RotaryTable, make_rotary_table

Linear = Callable[[Tensor], Tensor]
"""Maps x [rows, in] to [rows, out]."""


FusedLayer: TypeAlias = DecoderLayer[Linear]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedModel:
    """The parts of a model that the fused step reads.

    `eps`: the epsilon of all norms. `scaling`: factor of the attention scores. `num_layer_weights`:
    number of weights in the matrix products of the first layer.
    """

    layers: tuple[FusedLayer, ...]
    embedding: Tensor
    head: Linear
    final_norm: Tensor
    eps: float
    num_heads: int
    head_dim: int
    scaling: float
    rotary: RotaryTable
    num_layer_weights: int


class JoinedLinear:
    """Computes x @ weight^T + bias with the unpacked weight, until `take` removes the weight, so
    that it can be packed.
    """

    def __init__(self, projection: Projection) -> None:
        # A separate tensor: an unjoined weight is the module's parameter, whose data is replaced.
        self._weight = projection.weight.detach()
        self._bias = projection.bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [rows, in]; return [rows, out]."""
        return functional.linear(x, self._weight, self._bias)

    def take(self) -> Projection:
        """Return weight and bias; drop this object's reference to the weight, so that its memory
        can be freed.
        """
        taken = Projection(weight=self._weight, bias=self._bias)
        self._weight = self._weight.new_zeros(0)
        return taken


def check_packing(tree: DecoderTree, kernels: Kernels, *, is_int8: bool) -> None:
    """Raise NotFused if the packed format of the CPU kernels does not support a matrix of the first
    layer, naming its number of inputs.
    """
    dtype = _packed_format(tree.embedding.dtype, kernels, is_int8=is_int8)
    widths = {linears[0].in_features for linears in tree.layers[0].products}
    for width in sorted(widths):
        if dtype is not None and not can_pack(width, dtype):
            raise NotFused(f"a product of {width} inputs in {dtype}")


def join_model(tree: DecoderTree, *, num_positions: int) -> FusedModel:
    """Return the weights of the recognised model `tree`, joined.

    `num_positions`: number of positions of the rotary table.
    """
    first = tree.layers[0]
    num_layer_weights = sum(linear.weight.numel() for linear in chain(*first.products))
    return FusedModel(
        layers=tuple(
            layer.with_products(map(JoinedLinear, layer.products)) for layer in fuse_weights(tree)
        ),
        embedding=tree.embedding,
        head=JoinedLinear(Projection(weight=tree.head, bias=None)),
        final_norm=tree.final_norm,
        eps=tree.eps,
        num_heads=tree.num_heads,
        head_dim=tree.head_dim,
        scaling=tree.scaling,
        rotary=make_rotary_table(
            tree.inverse_frequencies,
            tree.rotary_scaling,
            num_positions=num_positions,
            device=tree.embedding.device,
        ),
        num_layer_weights=num_layer_weights,
    )


def pack_model(
    model: FusedModel, tree: DecoderTree, kernels: Kernels, *, is_int8: bool
) -> FusedModel:
    """Return the model with packed weights, or with the unpacked ones if there is no packing for
    its dtype. `is_int8`: pack in 8 bits.

    The modules of `tree` lose the weights of their layers. `model` loses the weights that are
    packed, so it must not be used afterwards.
    """
    pack = _packing(model.embedding.dtype, kernels, is_int8=is_int8)
    layer_bytes = model.num_layer_weights * model.embedding.itemsize
    progress = LoadProgress("packing weights", len(model.layers) * layer_bytes)
    layers: list[FusedLayer] = []
    for layer, modules in zip(model.layers, tree.layers, strict=True):
        _release(modules)
        layers.append(layer.with_products(map(pack, layer.products)))
        progress.add(layer_bytes)
    return replace(model, layers=tuple(layers), head=pack(model.head))


def num_packed_bytes(model: FusedModel) -> int:
    """Return the total size, in bytes, of the matrices packed for Penstock's CPU kernels."""
    linears = [linear for layer in model.layers for linear in layer.products]
    return sum(one.num_bytes for one in (*linears, model.head) if isinstance(one, PackedLinear))


def _release(layer: LayerTree) -> None:
    """Free the unpacked weights of a layer's modules, because the fused step does not need them."""
    for linear in chain(*layer.products):
        linear.weight.data = freed_weight(linear.weight.detach())


def _packing(dtype: torch.dtype, kernels: Kernels, *, is_int8: bool) -> Callable[[Linear], Linear]:
    """Return the function that packs a linear layer of a model of `dtype`; it returns the layer
    unchanged if there is no packing for it.
    """
    packed_dtype = _packed_format(dtype, kernels, is_int8=is_int8)
    if packed_dtype is not None:
        return partial(_pack, kernels, packed_dtype)
    if dtype == torch.bfloat16 and can_prepack():
        return _prepack
    return lambda joined: joined


def _packed_format(dtype: torch.dtype, kernels: Kernels, *, is_int8: bool) -> torch.dtype | None:
    """Return the packed format of the weights; None if the matrix products do not use the CPU
    kernels.
    """
    if is_int8:
        return torch.int8
    return dtype if dtype == torch.bfloat16 and uses_compiled_bf16(kernels) else None


def _pack(kernels: Kernels, dtype: torch.dtype, joined: Linear) -> Linear:
    projection = _take(joined)
    return PackedLinear(kernels, projection.weight, projection.bias, dtype)


def _prepack(joined: Linear) -> Linear:
    projection = _take(joined)
    return PrepackedLinear(projection.weight, projection.bias)


def _take(linear: Linear) -> Projection:
    if not isinstance(linear, JoinedLinear):
        raise TypeError("packed already")
    return linear.take()
