"""A Hugging Face folder in, a model that runs packed steps out.

Owns the only call into transformers' loading, and the probe that shows what the model really does
with attention. Reads the folder, never the network.
"""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.architecture import Architecture, read_architecture
from penstock.executor.torch.attention_interface import (
    ATTENTION_NAME,
    attach_runner,
    register_attention,
)
from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel
from penstock.executor.torch.kv_pages import HeadShape
from penstock.executor.torch.paged_attention import Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to serve. `shapes`: keys and values of each layer; `scorings`: how each layer
    makes its scores."""

    module: nn.Module
    architecture: Architecture
    shapes: tuple[HeadShape, ...]
    scorings: tuple[Scoring, ...]
    vocab_size: int
    num_embeddings: int
    dtype: torch.dtype
    device: torch.device

    def logits(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        """One packed forward; logits [len(rows), vocabulary] of the packed tokens `rows`."""
        out = self.module(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: Tensor = out.logits[0]
        return logits


def load_configured(config: ExecutorConfig) -> LoadedModel:
    """Load what the settings name, with as many threads as they give."""
    if config.model_path is None:
        raise ValueError("model_path must be given for the torch executor")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return load_model(config.model_path, device=config.device, dtype=config.dtype)


def load_model(path: Path, *, device: str, dtype: str) -> LoadedModel:
    """Load config.json and safetensors of `path`. `dtype` "auto": as the weights are stored.

    Raises ModelLoadError for a folder that cannot be loaded, UnsupportedModel for a model that
    paged attention would compute wrongly.
    """
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelLoadError(f"{path} has no *.safetensors weights")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(f"device {device} was asked for and CUDA is not available")
    register_attention()
    transformers_logging.disable_progress_bar()
    try:
        _check_model_type(path)
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        architecture = read_architecture(config.get_text_config())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    module, found = loaded
    # transformers fills what is missing or does not fit with random numbers and a warning.
    entries: list[Any] = list(found.get("mismatched_keys", ()))
    # Names alone before transformers 5, then names with both shapes.
    mismatched = {entry if isinstance(entry, str) else str(entry[0]) for entry in entries}
    absent = sorted(mismatched.union(found.get("missing_keys", ())))
    if absent:
        raise ModelLoadError(f"{path}: no weights, or of another shape, for {', '.join(absent)}")
    module.eval().requires_grad_(False).to(device)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(f"{architecture.name} cannot compute the logits of chosen tokens")
    probe, vocab_size = _probe(module, architecture)
    layers = range(architecture.num_layers)
    weight = _embedding_weight(module)
    return LoadedModel(
        module=module,
        architecture=architecture,
        shapes=tuple(probe.shapes[layer] for layer in layers),
        scorings=tuple(probe.scorings[layer] for layer in layers),
        vocab_size=vocab_size,
        num_embeddings=weight.shape[0],
        dtype=weight.dtype,
        device=weight.device,
    )


def _check_model_type(path: Path) -> None:
    """Refuse an architecture that transformers has no code for; it would answer with advice."""
    try:
        values: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return  # transformers says well what is wrong with the file
    model_type: Any = values.get("model_type") if isinstance(values, dict) else None
    if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} does not know the architecture {model_type!r}"
        )


def _embedding_weight(module: Any) -> Tensor:
    embedding: nn.Module = module.get_input_embeddings()
    return next(embedding.parameters())


class _Probe:
    """Stands in for attention once and writes down what every layer asks for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.shapes: dict[int, HeadShape] = {}
        self.scorings: dict[int, Scoring] = {}

    def run_layer(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise UnsupportedModel(f"layer {layer} has keys and values of different sizes")
        if key.dtype != self._dtype or value.dtype != self._dtype:
            raise UnsupportedModel(f"layer {layer} has keys and values in another precision")
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} attends more than once")
        self.shapes[layer] = HeadShape(num_heads=key.shape[1], head_dim=key.shape[2])
        self.scorings[layer] = scoring
        return torch.zeros_like(query)


@torch.inference_mode()
def _probe(module: Any, architecture: Architecture) -> tuple[_Probe, int]:
    """Run two tokens and check that every layer's attention came through the interface."""
    probe = _Probe(_embedding_weight(module).dtype)
    attach_runner(module, probe)
    ids = torch.zeros((1, 2), dtype=torch.long, device=module.device)
    positions = torch.arange(2, device=module.device)[None]
    out = module(
        input_ids=ids,
        position_ids=positions,
        attention_mask=None,
        use_cache=False,
        logits_to_keep=positions[0, 1:],
    )
    missing = sorted(set(range(architecture.num_layers)) - probe.shapes.keys())
    if missing or len(probe.shapes) != architecture.num_layers:
        raise UnsupportedModel(f"{architecture.name}: layers {missing} bypass our attention")
    windowed = {layer for layer, scoring in probe.scorings.items() if scoring.window}
    unwindowed = sorted(architecture.windowed_layers - windowed)
    if unwindowed:
        raise UnsupportedModel(f"{architecture.name}: layers {unwindowed} hide their window")
    return probe, int(out.logits.shape[-1])
