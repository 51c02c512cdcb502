"""Checks in float32, layer by layer, that a model's forward pass matches its recognised module
tree.

In half precision, rounding would hide a scaling factor close to 1, or a layer that does not apply
rotary embeddings. So the modules run once in float32, one layer at a time, at positions up to the
model's maximum position, and every part is compared with the arithmetic expected from the tree.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.torch.attention_interface import attach_runner
from penstock.executor.torch.eight_bit_linear import wide_weight
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.module_tree import DecoderTree, LayerTree, NotFused
from penstock.executor.torch.paged_attention import Scoring
from penstock.executor.torch.rotary_table import RotaryTable, rotary_of
from penstock.executor.torch.whole_sequence import WholeSequence

_TOLERANCE = 1e-3
_ROUNDING = 1e-6
"""Rounding error relative to the whole output, because a layer adds little to a large residual."""
_LEAST = 1e-30
_NUM_FAR = 12
_NUM_HEAD_ROWS = 1024
"""Number of rows of the LM head that are in float32 at a time."""


@torch.inference_mode()
def check_structure(model: LoadedModel, tree: DecoderTree, ids: Tensor) -> Tensor:
    """Check that the model's forward pass matches `tree`; return the float32 logits [len(ids),
    vocabulary] of `ids` at positions 0, 1, ...

    Raises NotFused naming the first part that differs; an out-of-memory error is raised unchanged.
    Restores the modules' weights.
    """
    windows = {layer.window for layer in tree.layers if layer.window}
    far = _far_positions(len(ids), model.architecture.max_seq_len, windows)
    positions = torch.cat([torch.arange(len(ids)), far]).to(model.device)
    repeated = ids.repeat(-(-len(positions) // len(ids)))[: len(positions)].to(model.device)
    check = _StructureCheck(model, tree, repeated, positions)
    try:
        with check.attached():
            rows = torch.arange(len(positions), device=model.device)
            found = model.logits(repeated[None], positions[None], rows)
        return check.compare_logits(found)[: len(ids)]
    except (NotFused, torch.OutOfMemoryError):
        raise
    except Exception as failure:  # parts with other shapes, or called differently
        raise NotFused(f"the recognised module tree does not run: {failure}") from failure


def _far_positions(first: int, longest: int, windows: set[int]) -> Tensor:
    """Return test positions from `first` on: logarithmically spaced, and around the ends of
    windows.
    """
    spread = torch.logspace(0, 1, _NUM_FAR, base=max(longest / first, 1.0)) * first
    found = {min(round(position), longest - 1) for position in spread.tolist()}
    found.update(window + offset for window in windows for offset in (-1, 0, 1))
    return torch.tensor(sorted(at for at in found if first <= at < longest), dtype=torch.int64)


class _StructureCheck(WholeSequence):
    """Compares one forward pass of the modules with the arithmetic of the tree, part by part."""

    def __init__(
        self, model: LoadedModel, tree: DecoderTree, ids: Tensor, positions: Tensor
    ) -> None:
        self._model = model
        self._tree = tree
        self._positions = positions
        self._rotary = rotary_of(positions, tree.inverse_frequencies, tree.rotary_scaling)
        self._hidden = tree.embedding[ids].float()
        self._attended = self._hidden
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def attached(self) -> Generator[None]:
        """Return a context in which a forward pass of the model converts its modules to float32,
        layer by layer, and compares their results. The modules are restored at the end.
        """
        module = self._model.module
        decoder: Any = module.get_submodule("model")
        head = module.get_submodule("lm_head")

        def widen_output(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
            return out.float()

        def before_norm(_module: nn.Module, _args: object) -> None:
            self._widen(decoder.norm)

        def before_head(_module: nn.Module, _args: object) -> None:
            self._widen(head, self._head_step)

        hooks = [decoder.embed_tokens.register_forward_hook(widen_output)]
        for index, layer in enumerate(decoder.layers):
            hooks += self._hooks_of_layer(index, layer)
        hooks.append(decoder.norm.register_forward_pre_hook(before_norm))
        hooks.append(head.register_forward_pre_hook(before_head))
        attach_runner(module, self)
        try:
            yield
        finally:
            attach_runner(module, WholeSequence())  # so that this object can be freed
            self._restore()
            for hook in hooks:
                hook.remove()

    def run_layer(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Same as `WholeSequence.run_layer`, but first compare the options of the scores, and the
        queries, keys and values, with the options and values expected from the tree. Raises
        NotFused if they differ.
        """
        tree, expected = self._tree, self._tree.layers[layer]
        if not scoring.is_plain or (scoring.scaling, scoring.window) != (
            tree.scaling,
            expected.window,
        ):
            raise NotFused(f"layer {layer} computes scores differently from its first step")
        parts = self._project(expected)
        for name, found, part in zip(
            ("queries", "keys", "values"), (query, key, value), parts, strict=True
        ):
            self._compare(f"the {name} of layer {layer}", found.flatten(1), part.flatten(1))
        self._attended = super().run_layer(layer, query, key, value, scoring)
        return self._attended

    def compare_logits(self, found: Tensor) -> Tensor:
        """Compare `found`, the logits of every `_head_step`-th vocabulary entry, with the expected
        logits; return the expected logits of all entries, float32 [tokens, vocabulary]. Raises
        NotFused if they differ.
        """
        tree = self._tree
        hidden = _rms_norm(self._hidden, tree.final_norm.float(), tree.eps)
        parts = [
            functional.linear(hidden, part.float()) for part in tree.head.split(_NUM_HEAD_ROWS)
        ]
        expected = torch.cat(parts, -1)
        self._compare("the logits", found, expected[:, :: self._head_step])
        return expected

    @property
    def _head_step(self) -> int:
        return -(-len(self._tree.head) // _NUM_HEAD_ROWS)

    def _hooks_of_layer(self, index: int, layer: nn.Module) -> list[Any]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given: Tensor = args[0] if args else kwargs["hidden_states"]
            what = f"the input of layer {index}" if index else "the embeddings"
            self._compare(what, given[0], self._hidden)
            self._widen(layer)

        def after(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
            found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
            expected = self._finish(self._tree.layers[index])
            self._compare(f"the output of layer {index}", found, expected, self._hidden)
            self._hidden = expected
            self._restore()

        return [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after),
        ]

    def _project(self, layer: LayerTree) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [tokens, heads, head_dim] of the hidden state."""
        tree = self._tree
        normed = _rms_norm(self._hidden, layer.input_norm, tree.eps)
        joined = _linear(normed, layer.qkv).unflatten(-1, (-1, tree.head_dim))
        query, key, value = joined.split(
            (tree.num_heads, tree.num_kv_heads, tree.num_kv_heads), dim=1
        )
        if layer.query_norm is not None:
            query = _rms_norm(query, layer.query_norm, tree.eps)
        if layer.key_norm is not None:
            key = _rms_norm(key, layer.key_norm, tree.eps)
        return _rotate(query, self._rotary), _rotate(key, self._rotary), value

    def _finish(self, layer: LayerTree) -> Tensor:
        """Return a layer's output, computed from the output of its attention."""
        hidden = self._hidden + _linear(self._attended.flatten(1), layer.out)
        normed = _rms_norm(hidden, layer.output_norm, self._tree.eps)
        gate, up = _linear(normed, layer.gate_up).chunk(2, -1)
        return hidden + _linear(functional.silu(gate) * up, layer.down)

    def _compare(
        self, what: str, found: Tensor, expected: Tensor, base: Tensor | None = None
    ) -> None:
        """Compare token by token; raise NotFused if a token differs by more than rounding. `base`:
        the residual that `found` and `expected` are added to.
        """
        size = expected if base is None else expected - base
        greatest = size.norm(dim=-1) + _ROUNDING / _TOLERANCE * expected.norm(dim=-1)
        errors = (found - expected).norm(dim=-1) / greatest.clamp_min(_LEAST)
        if bool((errors <= _TOLERANCE).all()):
            return
        position = int(self._positions[errors.nan_to_num(torch.inf).argmax()])
        factor = _factor(found - expected + size, size)
        raise NotFused(
            f"it differs from the recognised module tree in {what}:"
            f" by {float(errors.amax()):.1e} at position {position}{factor}"
        )

    def _widen(self, module: nn.Module, step: int = 1) -> None:
        """Convert a module's parameters, or every `step`-th row of them, to float32; 8-bit
        parameters are converted where they are used.
        """
        for parameter in module.parameters():
            if parameter.itemsize == 1:
                continue
            self._kept.append((parameter, parameter.data))
            parameter.data = parameter.data[::step].float()

    def _restore(self) -> None:
        for parameter, data in self._kept:
            parameter.data = data
        self._kept.clear()


def _factor(found: Tensor, expected: Tensor) -> str:
    """Return a text about the factor between `found` and `expected`, "" if they do not differ by a
    factor.
    """
    factor = float((found * expected).sum() / expected.square().sum())
    is_common = (found - factor * expected).norm() < 0.5 * (found - expected).norm()
    return f", {factor:.3g} times as great" if is_common else ""


def _linear(x: Tensor, linears: tuple[nn.Linear, ...]) -> Tensor:
    return torch.cat(
        [functional.linear(x, wide_weight(one, x.dtype), one.bias) for one in linears], -1
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, rotary: RotaryTable) -> Tensor:
    """Apply rotary embeddings to x [tokens, heads, head_dim] (half-split layout)."""
    cosines, sines = rotary.cosines[:, None], rotary.sines[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
