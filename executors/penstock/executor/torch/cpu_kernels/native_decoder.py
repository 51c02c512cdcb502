"""Runs all layers of a decoder in one call of the compiled kernels.

Contains the ctypes mirror of the structures in layers.c, and the buffers between operators. Every
step reuses these buffers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.cpu_kernels.native import NativeKernels, NativeLayer
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from penstock.executor.torch.decoder_layer import DecoderLayer
from penstock.executor.torch.rotary_table import RotaryTable


class _CLayer(ctypes.Structure):
    """Mirrors the C structure `DecoderLayer` of layers.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            *("attention", "qkv", "out", "gate_up", "down"),
            *("input_norm", "output_norm", "query_norm", "key_norm"),
        )
    )


class _CDecoder(ctypes.Structure):
    """Mirrors the C structure `Decoder` of layers.c."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("rotary", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("hidden", ctypes.c_int64),
        ("feed_forward", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


_ACTIVATIONS = ("residual", "added", "normed", "qkv", "attended", "gate_up", "activated")


class _CActivations(ctypes.Structure):
    """Mirrors the C structure `Activations` of layers.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _ACTIVATIONS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativeDecoderLayer:
    """The weights and the attention of one layer."""

    weights: DecoderLayer[PackedMatrix]
    attention: NativeLayer

    def to_c(self, hidden: int, dtype: torch.dtype) -> _CLayer:
        """Convert to the C structure, for a decoder with this hidden size and dtype. Raises
        ValueError if the shapes or formats of the parts do not match.
        """
        layer = self.weights
        for norm in (layer.input_norm, layer.output_norm):
            if norm.shape != (hidden,) or norm.dtype is not dtype or norm.stride(0) != 1:
                raise ValueError("a norm's weight does not fit the hidden size")
        self.attention.check_norms(layer.query_norm, layer.key_norm)
        wide = layer.down.num_inputs
        sizes = (layer.qkv.num_inputs, layer.gate_up.num_inputs, layer.out.num_outputs)
        if {*sizes, layer.down.num_outputs} != {hidden} or layer.gate_up.num_outputs != 2 * wide:
            raise ValueError("matrices of a layer do not fit together")
        if (layer.out.num_inputs, layer.qkv.num_outputs) != self.attention.widths:
            raise ValueError("matrices of a layer do not fit its heads")
        return _CLayer(
            attention=self.attention.address,
            qkv=layer.qkv.address,
            out=layer.out.address,
            gate_up=layer.gate_up.address,
            down=layer.down.address,
            input_norm=layer.input_norm.data_ptr(),
            output_norm=layer.output_norm.data_ptr(),
            query_norm=None if layer.query_norm is None else layer.query_norm.data_ptr(),
            key_norm=None if layer.key_norm is None else layer.key_norm.data_ptr(),
        )


class NativeDecoder:
    """Runs `layers` over embeddings of `dtype`. Raises ValueError if the layers do not fit
    together.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        layers: Sequence[NativeDecoderLayer],
        rotary: RotaryTable,
        *,
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        self._kernels = kernels
        self._kept = tuple(layers), rotary
        first = layers[0]
        hidden, wide = first.weights.qkv.num_inputs, first.weights.down.num_inputs
        query_size, qkv_size = first.attention.widths
        self._widths = (hidden, hidden, qkv_size, query_size, 2 * wide, wide)
        self._buffer = torch.empty((0, sum(self._widths)), dtype=dtype)
        self._layers = (_CLayer * len(layers))(*(layer.to_c(hidden, dtype) for layer in layers))
        if any(layer.attention.widths != first.attention.widths for layer in layers):
            raise ValueError("layers of different heads")
        self._struct = _CDecoder(
            layers=ctypes.addressof(self._layers),
            num_layers=len(layers),
            rotary=first.attention.rotary_address(rotary.cosines, rotary.sines),
            eps=eps,
            hidden=hidden,
            feed_forward=wide,
            is_bf16=dtype is torch.bfloat16,
        )

    def run(self, rows: StepRows, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers over `residual` [tokens, hidden]; change it in place.

        Return the last layer's output, not yet added to the residual, and its queries, keys and
        values [tokens, elements]. Both tensors are valid until the next call. Raises ValueError for
        tensors that do not fit, MemoryError if a kernel runs out of memory.
        """
        num_tokens, hidden = residual.shape
        dtype = self._buffer.dtype
        if hidden != self._widths[0] or residual.dtype is not dtype:
            raise ValueError(
                f"{residual.dtype} {tuple(residual.shape)} is not a row of this decoder"
            )
        if rows.num_tokens != num_tokens or not residual.is_contiguous():
            raise ValueError(f"{num_tokens} rows for {rows.num_tokens} tokens, or not dense ones")
        if len(self._buffer) < num_tokens:
            self._buffer = torch.empty((num_tokens, sum(self._widths)), dtype=dtype)
        flat = self._buffer.view(-1)[: num_tokens * sum(self._widths)]
        parts = [
            part.view(num_tokens, -1)
            for part in flat.split([num_tokens * width for width in self._widths])
        ]
        addresses = (part.data_ptr() for part in (residual, *parts))
        activations = _CActivations(*addresses)
        self._kernels.run_layers(
            ctypes.addressof(self._struct), rows, ctypes.addressof(activations), num_tokens
        )
        return parts[0], parts[2]
