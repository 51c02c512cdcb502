"""Reads a model's transformers configuration; rejects models that paged attention does not support.

Does not load weights. Checks the properties that are not visible when the attention function is
called: attention in both directions, layers of other types or with shared keys and values, and
rotary embeddings that change with the longest sequence of the batch (a token would depend on other
requests).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.executor.torch.errors import UnsupportedModel

_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The properties of a model that its configuration states.

    `name`: the configuration's `model_type`. `max_seq_len`: in tokens; with longrope embeddings,
    the length up to which their frequencies do not change. `windowed_layers`: the indices of the
    layers that must use a sliding window. `undeclared_window`: size in tokens of a sliding window
    for which the configuration names no layers, or 0.
    """

    name: str
    max_seq_len: int
    num_layers: int
    windowed_layers: frozenset[int]
    undeclared_window: int = 0


def read_architecture(config: Any) -> Architecture:
    """Return the properties of a text model from its configuration. Raises UnsupportedModel naming
    the unsupported property.
    """
    name = str(getattr(config, "model_type", "unknown"))
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is not a decoder-only model")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"{name} attends in both directions")
    layer_types: list[str] = list(getattr(config, "layer_types", None) or ())
    unknown = sorted(set(layer_types) - _SUPPORTED_LAYERS)
    if unknown:
        raise UnsupportedModel(f"{name} has layers that are not attention over pages: {unknown}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name} shares keys and values between layers")
    max_seq_len = int(getattr(config, "max_position_embeddings", 0) or 0)
    if max_seq_len < 1:
        raise UnsupportedModel(f"{name} does not state max_position_embeddings")
    for rope in _rope_settings(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "dynamic":
            raise UnsupportedModel(f"{name} has rotary embeddings that depend on the whole batch")
        if kind == "longrope":
            # Beyond its original length, longrope changes all frequencies as soon as one sequence
            # is long.
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            max_seq_len = min(max_seq_len, int(original or max_seq_len))
    return Architecture(
        name=name,
        max_seq_len=max_seq_len,
        num_layers=int(config.num_hidden_layers),
        windowed_layers=frozenset(
            layer for layer, kind in enumerate(layer_types) if kind == "sliding_attention"
        ),
        undeclared_window=0 if layer_types else _window(config),
    )


def _window(config: Any) -> int:
    """Return the sliding window that the configuration enables, in tokens, or 0."""
    if getattr(config, "use_sliding_window", True) is False:
        return 0
    return int(getattr(config, "sliding_window", 0) or 0)


def _rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary settings, one for the model or one for each layer type; empty if there are
    none.
    """
    settings: Any = getattr(config, "rope_parameters", None)
    if settings is None:
        settings = getattr(config, "rope_scaling", None)  # its name before transformers 5
    if not isinstance(settings, Mapping):
        return []
    nested: list[Any] = [value for value in settings.values() if isinstance(value, Mapping)]
    return nested or [settings]
