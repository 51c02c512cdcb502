"""The parts of a decoder layer that the fused step (the forward pass with Penstock's kernels) uses.

Their products are of another type in each stage: modules, joined weights, functions, packed
matrices.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

_Product = TypeVar("_Product")
_Other = TypeVar("_Other")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer(Generic[_Product]):
    """The matrix products and norm weights of one layer. `input_norm` and `output_norm` are
    [hidden]; `query_norm` and `key_norm` are [head_dim], None if the layer has no such norm.
    `window`: the sliding window in tokens, 0 for none.
    """

    qkv: _Product
    out: _Product
    gate_up: _Product
    down: _Product
    input_norm: Tensor
    output_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int

    @property
    def products(self) -> tuple[_Product, _Product, _Product, _Product]:
        """The matrix products, in the order in which a step computes them."""
        return self.qkv, self.out, self.gate_up, self.down

    def with_products(self, products: Iterable[_Other]) -> "DecoderLayer[_Other]":
        """Return a layer with these four products, in the order of `products`, and the same
        norms.
        """
        qkv, out, gate_up, down = products
        return DecoderLayer(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            input_norm=self.input_norm,
            output_norm=self.output_norm,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            window=self.window,
        )
