"""Runs test steps at load that determine each layer's attention options and check that packed
sequences do not affect each other.

Rejects a model whose output for a token depends on anything but the token's sequence and positions.
The model processes a packed step as a single row. A model that uses indices instead of positions,
shifts positions, or carries state from one token to the next would generate plausible text that
differs from an unpacked run. Three short forward passes detect this, regardless of the cause.
"""

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.executor.torch.architecture import Architecture
from penstock.executor.torch.attention_interface import attach_runner
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.kv_pages import HeadShape
from penstock.executor.torch.paged_attention import Scoring

_NUM_TOKENS = 12
_NUM_PAST = 5
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.05
"""Accepted difference of logits in half precision, relative to the standard deviation of a token's
logits. Rounding errors are far smaller, the effect of a wrong position is larger.
"""

KeysValues = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [tokens, heads, head_dim] by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The results of the test steps. `architecture`: with `max_seq_len` lowered if a sliding window
    requires it.
    """

    architecture: Architecture
    shapes: tuple[HeadShape, ...]
    scorings: tuple[Scoring, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedSegment:
    """A part of a packed row: `num_tokens` tokens that follow `num_past` cached tokens of the same
    sequence. The sequence begins at position `start`.
    """

    num_tokens: int
    start: int = 0
    num_past: int = 0


class _SegmentAttention:
    """Attends within each segment of a packed row, and records each layer's keys, values and
    scoring.
    """

    def __init__(
        self, dtype: torch.dtype, segments: tuple[_PackedSegment, ...], past: KeysValues
    ) -> None:
        self._dtype = dtype
        self._segments = segments
        self._past = past
        self.seen: KeysValues = {}
        self.scorings: dict[int, Scoring] = {}

    @property
    def windowed(self) -> set[int]:
        """The indices of the layers with sliding-window attention."""
        return {layer for layer, scoring in self.scorings.items() if scoring.window}

    def run_layer(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise UnsupportedModel(f"layer {layer} has keys and values of different sizes")
        if key.dtype != self._dtype or value.dtype != self._dtype:
            raise UnsupportedModel(f"layer {layer} has keys and values in another number format")
        if layer in self.seen:
            raise UnsupportedModel(f"layer {layer} attends more than once")
        self.seen[layer] = key, value
        self.scorings[layer] = scoring
        out, first = torch.empty_like(query), 0
        for segment in self._segments:
            rows = slice(first, first + segment.num_tokens)
            first = rows.stop
            keys, values = key[rows], value[rows]
            if segment.num_past:
                old_keys, old_values = self._past[layer]
                keys = torch.cat([old_keys[: segment.num_past], keys])
                values = torch.cat([old_values[: segment.num_past], values])
            out[rows] = _attend(query[rows], keys, values, scoring)
        return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Attend causally, in float32, with the queries [n, Hq, D] of the last n of m tokens to keys
    and values [m, H, D] of all m; return [n, Hq, D].
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", query.float(), keys) * scoring.scaling
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    num_keys, device = len(keys), query.device
    rows = torch.arange(num_keys - len(query), num_keys, device=device)[:, None]
    columns = torch.arange(num_keys, device=device)
    is_seen = columns <= rows
    if scoring.window:
        is_seen &= columns > rows - scoring.window
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :num_keys]
    return torch.einsum("hnm,mhd->nhd", weights, values).to(query.dtype)


@torch.inference_mode()
def probe_model(module: Any, architecture: Architecture, dtype: torch.dtype) -> ProbeResult:
    """Run the test steps and return the results. Raises UnsupportedModel if packed steps would
    compute the model wrongly, its logits are not finite, its vocabulary is too small for the test,
    or its `forward` has no argument `logits_to_keep`.
    """
    name = architecture.name
    parameters = inspect.signature(module.forward).parameters
    if "logits_to_keep" not in parameters:
        raise UnsupportedModel(f"{name} cannot compute the logits of chosen tokens")
    own, other = _tokens(module)
    differ = partial(_differ, is_half=dtype.itemsize < torch.float32.itemsize)
    whole = _PackedSegment(num_tokens=_NUM_TOKENS)
    counted = _Packed(module, dtype, ((own, whole), (other, whole), (own, whole)))
    shapes = _shapes(counted.attention, architecture)
    # The same number of tokens as before, for the same rounding. Includes the last supported
    # position, because tables must cover it and it must not affect other sequences.
    mixed = _Packed(
        module,
        dtype,
        (
            (other[: _NUM_PAST - 1], _PackedSegment(num_tokens=_NUM_PAST - 1)),
            (
                own[_NUM_PAST:],
                _PackedSegment(num_tokens=_NUM_TOKENS - _NUM_PAST, num_past=_NUM_PAST),
            ),
            (other[:1], _PackedSegment(num_tokens=1, start=architecture.max_seq_len - 1)),
            (other, whole),
            (own, whole),
        ),
        past=counted.attention.seen,
    )
    expected = counted.logits(0)
    if not bool(torch.isfinite(expected).all()):
        raise UnsupportedModel(
            f"{name}: logits of a test step are not finite: the weights are not, or values"
            f" overflow in {dtype}"
        )
    packed = (counted.logits(2), mixed.logits(4))
    if any(differ(expected, logits) for logits in packed):
        has_positions = "position_ids" in parameters
        hint = "" if has_positions else ": it has no position_ids argument and counts tokens itself"
        raise UnsupportedModel(f"{name} depends on the sequences it is packed with{hint}")
    if differ(expected[_NUM_PAST:], mixed.logits(1)):
        raise UnsupportedModel(f"{name} depends on how a prompt is split into chunks")
    # A model that ignores positions treats the tokens as one sequence, which starts with the same
    # tokens.
    one = _PackedSegment(num_tokens=3 * _NUM_TOKENS)
    plain = _Packed(module, dtype, ((torch.cat([own, other, own]), one),), has_positions=False)
    if differ(expected, plain.logits(0)[:_NUM_TOKENS]):
        raise UnsupportedModel(f"{name} does not count positions from 0")
    scorings = counted.attention.scorings
    return ProbeResult(
        architecture=_bounded(architecture, counted.attention.windowed),
        shapes=shapes,
        scorings=tuple(scorings[layer] for layer in range(architecture.num_layers)),
        vocab_size=int(expected.shape[-1]),
    )


def _tokens(module: Any) -> tuple[Tensor, Tensor]:
    """Return two test sequences without special tokens. Raises UnsupportedModel if the vocabulary
    is too small.
    """
    config = module.config.get_text_config()
    special = {
        value
        for one in (module.config, config)
        for name, value in vars(one).items()
        if name.endswith("_token_id") or name.endswith("_token_index")
    }
    usable = [token for token in range(min(config.vocab_size, 1000)) if token not in special]
    ids = torch.tensor(usable, device=module.device)
    if len(ids) < 2 * _NUM_TOKENS:
        raise UnsupportedModel(f"a vocabulary of {config.vocab_size} is too small")
    stride = len(ids) // (2 * _NUM_TOKENS)
    ids = ids[torch.randperm(2 * _NUM_TOKENS, generator=torch.Generator().manual_seed(0)) * stride]
    return ids[:_NUM_TOKENS], ids[_NUM_TOKENS:]


class _Packed:
    """Runs one packed forward pass of (tokens, segment) pairs."""

    def __init__(
        self,
        module: Any,
        dtype: torch.dtype,
        parts: tuple[tuple[Tensor, _PackedSegment], ...],
        *,
        past: KeysValues | None = None,
        has_positions: bool = True,
    ) -> None:
        self._segments = tuple(segment for _, segment in parts)
        self.attention = _SegmentAttention(dtype, self._segments, past or {})
        attach_runner(module, self.attention)
        ids = torch.cat([tokens for tokens, _ in parts])
        positions: Tensor | None = None
        if has_positions:
            firsts = [segment.start + segment.num_past for segment in self._segments]
            counts = [segment.num_tokens for segment in self._segments]
            ranges = [torch.arange(n) + first for first, n in zip(firsts, counts, strict=True)]
            positions = torch.cat(ranges)[None].to(ids.device)
        out = module(
            input_ids=ids[None],
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=torch.arange(len(ids), device=ids.device),
        )
        self._logits: Tensor = out.logits[0].float()

    def logits(self, index: int) -> Tensor:
        """Return logits [tokens, vocabulary] of one segment."""
        first = sum(segment.num_tokens for segment in self._segments[:index])
        return self._logits[first : first + self._segments[index].num_tokens]


def _shapes(attention: _SegmentAttention, architecture: Architecture) -> tuple[HeadShape, ...]:
    """Return the shapes of each layer's keys and values. Raises UnsupportedModel for a layer that
    did not call the registered attention function, or did not pass its window.
    """
    name, layers = architecture.name, range(architecture.num_layers)
    missing = sorted(set(layers) - attention.seen.keys())
    if missing or len(attention.seen) != architecture.num_layers:
        raise UnsupportedModel(f"{name}: layers {missing} bypass our attention")
    unwindowed = sorted(architecture.windowed_layers - attention.windowed)
    if unwindowed:
        raise UnsupportedModel(f"{name}: layers {unwindowed} hide their window")
    keys = [attention.seen[layer][0] for layer in layers]
    return tuple(HeadShape(num_heads=key.shape[1], head_dim=key.shape[2]) for key in keys)


def _bounded(architecture: Architecture, windowed: set[int]) -> Architecture:
    """Limit `max_seq_len` to a sliding window that is configured but not passed to attention by any
    layer.

    transformers applies such a window in its attention mask; this executor does not build that
    mask. Without the mask, results are correct for sequences up to the length of the window.
    """
    window = architecture.undeclared_window
    if not window or windowed:
        return architecture
    return replace(architecture, max_seq_len=min(architecture.max_seq_len, window))


def _differ(expected: Tensor, logits: Tensor, *, is_half: bool) -> bool:
    """Return whether logits [tokens, vocabulary] differ by more than rounding.

    In half precision, rounding may route single tokens to other experts, so only most tokens must
    agree.
    """
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (expected - logits).norm(dim=-1) / spread.clamp_min(1e-6)
    if is_half:
        return not bool(errors.median() <= _HALF_TOLERANCE)
    return not bool(errors.amax() <= _TOLERANCE)
