"""The fused step on a CPU: four matrix products and five kernels per layer, over packed tokens.

If all matrices are packed for the compiled kernels, one call runs all layers (`NativeDecoder`).
Single-token rows and chunks are computed in one forward pass, in the batch's order. Kernels read
keys and values only from the pages and never past the end of a sequence, so pages need no clearing
before their first use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.executor.torch.cpu.fused_model import FusedLayer, FusedModel
from penstock.executor.torch.cpu.step_threads import StepThreads
from penstock.executor.torch.cpu_kernels.kernels import Kernels, LayerAttention
from penstock.executor.torch.cpu_kernels.native import NativeKernels, NativeLayer
from penstock.executor.torch.cpu_kernels.native_decoder import NativeDecoder, NativeDecoderLayer
from penstock.executor.torch.cpu_kernels.packed_linear import PackedLinear
from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.step_forward import ForwardResult
from penstock.executor.torch.step_inputs import Ints
from penstock.scheduler.batch import Batch


class CpuFusedForward:
    """Runs a fused model with `kernels`; its keys and values are in `pages`."""

    def __init__(self, model: FusedModel, kernels: Kernels, pages: KVPages) -> None:
        self._model = model
        self._kernels = kernels
        self._rows = StepRows()
        self._layers = [
            _AttendedLayer(
                weights=weights,
                attention=kernels.layer(
                    pages.layer(index),
                    num_heads=model.num_heads,
                    scaling=model.scaling,
                    window=weights.window,
                    dtype=model.embedding.dtype,
                ),
            )
            for index, weights in enumerate(model.layers)
        ]
        self._decoder = _native_decoder(model, kernels, self._layers)
        self._threads = StepThreads(kernels.barrier_us)

    def run(self, batch: Batch, choose: Callable[[Ints], Ints]) -> ForwardResult:
        """Write the keys and values of a batch's tokens; return logits.

        `choose` gets `ForwardResult.last_of_row` and returns the indices of the packed tokens whose
        logits are returned.
        """
        model, ends = self._model, np.cumsum(batch.num_tokens, dtype=np.int64)
        residual = model.embedding.index_select(0, self._input_ids(batch, ends))
        is_token_good: Tensor | None = None
        with self._threads.computing(*self._layer_cost(batch)):
            added, qkv = self._run_layers(residual)
            if len(residual) > len(batch.sampled_slots):
                # Invalid values of earlier layers propagate to the last layer's keys and values,
                # also for tokens without sampled logits.
                is_token_good = torch.isfinite(qkv[:, model.num_heads * model.head_dim :]).all(1)
            wanted = choose(ends - 1)
            if not np.array_equal(wanted, np.arange(len(residual))):
                rows = torch.from_numpy(wanted)
                residual, added = residual.index_select(0, rows), added.index_select(0, rows)
            self._kernels.add_rms_norm(residual, added, model.final_norm, model.eps, residual)
            logits = model.head(residual)
        return ForwardResult(logits=logits, last_of_row=ends - 1, is_token_good=is_token_good)

    def _run_layers(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers; return the last layer's output, not yet added to the residual, and its
        queries, keys and values.
        """
        if self._decoder is not None:
            return self._decoder.run(self._rows, residual)
        normed = torch.empty_like(residual)
        first, *others = self._layers
        qkv = self._project(first, residual, None, normed)
        added = self._finish_layer(first, residual, qkv, normed)
        for layer in others:
            qkv = self._project(layer, residual, added, normed)
            added = self._finish_layer(layer, residual, qkv, normed)
        return added, qkv

    def _layer_cost(self, batch: Batch) -> tuple[int, int]:
        """Return the number of multiplications in one layer, and the size of its weights in bytes
        in the model's dtype, even if they are packed in 8 bits.
        """
        model, counts = self._model, batch.num_tokens.astype(np.int64)
        num_keys = int(counts @ (batch.starts + counts))
        num_attended = 2 * num_keys * model.num_heads * model.head_dim
        multiplications = int(counts.sum()) * model.num_layer_weights + num_attended
        return multiplications, model.num_layer_weights * model.embedding.itemsize

    def _input_ids(self, batch: Batch, ends: Ints) -> Tensor:
        """Return the ids of the packed input tokens, int64 [tokens]; set `self._rows` to the
        batch's rows.
        """
        arrays, slots, positions = batch.arrays, batch.slots, batch.starts
        firsts = ends - batch.num_tokens
        self._rows.set(
            first_tokens=firsts.astype(np.int32),
            num_tokens=batch.num_tokens,
            starts=positions,
            slots=slots,
            block_table=arrays.block_table,
        )
        if len(slots) < ends[-1]:
            positions = np.arange(ends[-1]) - np.repeat(firsts - positions, batch.num_tokens)
            slots = np.repeat(slots, batch.num_tokens)
        ids = arrays.token_ids[slots, positions].astype(np.int64)
        # An invalid token id fails its own request elsewhere; here it must not affect others.
        return torch.from_numpy(ids.clip(0, len(self._model.embedding) - 1))

    def _project(
        self, layer: "_AttendedLayer", residual: Tensor, added: Tensor | None, normed: Tensor
    ) -> Tensor:
        """Add `added`, unless it is None, to `residual` in place; return the queries, keys and
        values of the normalised sum, [tokens, elements]. `normed`: buffer for that sum.
        """
        weights = layer.weights
        self._kernels.add_rms_norm(residual, added, weights.input_norm, self._model.eps, normed)
        return weights.qkv(normed)

    def _finish_layer(
        self, layer: "_AttendedLayer", residual: Tensor, qkv: Tensor, normed: Tensor
    ) -> Tensor:
        """Run attention and add its output to `residual`, then run the feed-forward part; return
        the output of the feed-forward part, not yet added. Changes the queries in `qkv`, and
        `normed`.
        """
        model, weights = self._model, layer.weights
        layer.attention.rotate_and_write(
            self._rows,
            qkv,
            model.rotary.cosines,
            model.rotary.sines,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            eps=model.eps,
        )
        query = qkv[:, : model.num_heads * model.head_dim].unflatten(1, (model.num_heads, -1))
        attended = torch.empty(query.shape, dtype=query.dtype)
        layer.attention.attend(self._rows, query, attended)
        added = weights.out(attended.flatten(1))
        self._kernels.add_rms_norm(residual, added, weights.output_norm, model.eps, normed)
        gate_up = weights.gate_up(normed)
        activated = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
        self._kernels.silu_mul(gate_up, activated)
        return weights.down(activated)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AttendedLayer:
    weights: FusedLayer
    attention: LayerAttention


def _native_decoder(
    model: FusedModel, kernels: Kernels, layers: Sequence[_AttendedLayer]
) -> NativeDecoder | None:
    """Return the compiled decoder; None unless the kernels are compiled and all matrices of the
    layers are packed for them.
    """
    if not isinstance(kernels, NativeKernels):
        return None
    native: list[NativeDecoderLayer] = []
    for layer in layers:
        weights, attention = layer.weights, layer.attention
        packed = [one.matrix for one in weights.products if isinstance(one, PackedLinear)]
        if len(packed) < len(weights.products) or not isinstance(attention, NativeLayer):
            return None
        native.append(
            NativeDecoderLayer(weights=weights.with_products(packed), attention=attention)
        )
    return NativeDecoder(kernels, native, model.rotary, eps=model.eps, dtype=model.embedding.dtype)
