"""Loads a Hugging Face folder as a model that runs packed steps.

Calls transformers' loader and converts its errors. Reads only the folder, never the network. The
files are memory-mapped and copied to the device tensor by tensor, so the host never holds a second
copy.
"""

import json
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.utils import logging as transformers_logging

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.architecture import Architecture, read_architecture
from penstock.executor.torch.attention_interface import ATTENTION_NAME, register_attention
from penstock.executor.torch.cpu_kernels import kernels
from penstock.executor.torch.eight_bit_linear import EightBitLinear, widen
from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel
from penstock.executor.torch.kv_pages import HeadShape
from penstock.executor.torch.load_probe import probe_model
from penstock.executor.torch.load_progress import LoadProgress, size
from penstock.executor.torch.paged_attention import Scoring
from penstock.executor.torch.quantisation_settings import CONFIG
from penstock.executor.torch.quantised_checkpoint import (
    StoredWeight,
    check_not_quantised,
    is_quantised,
    read_quantised,
)

logger = logging.getLogger(__name__)
_HALF = "dtype bfloat16, "
_KEEP_NARROW = "quantization, which keeps the checkpoint's weights in 8 bits, "


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model. `shapes`: keys and values of each layer; `scorings`: how each layer computes
    its scores; `num_embeddings`: number of rows of the input embedding.
    """

    module: nn.Module
    architecture: Architecture
    shapes: tuple[HeadShape, ...]
    scorings: tuple[Scoring, ...]
    vocab_size: int
    num_embeddings: int
    dtype: torch.dtype
    device: torch.device

    def logits(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        """Run a packed forward pass of `input_ids`, `position_ids` int64 [1, T]; return logits [m,
        vocabulary] of the packed tokens with the indices `rows` int64 [m].
        """
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
    """Set PyTorch's number of threads, if configured, choose the CPU kernels, and load the
    configured model. Raises ValueError without a model path, otherwise the errors of `load_model`.
    """
    if config.model_path is None:
        raise ValueError("model_path must be given for the torch executor")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    kernels.choose(config.cpu_kernels)
    # On a CPU, 8-bit weights are packed from weights in the model's dtype.
    keeps_eight_bit = config.quantization != "none" and torch.device(config.device).type != "cpu"
    return load_model(
        config.model_path, device=config.device, dtype=config.dtype, keeps_eight_bit=keeps_eight_bit
    )


def load_model(
    path: Path, *, device: str, dtype: str, keeps_eight_bit: bool = False
) -> LoadedModel:
    """Load config.json and safetensors of `path`. `dtype` "auto": the dtype of the stored weights.
    `keeps_eight_bit`: linear layers stored in 8 bits, except the head, stay in 8 bits.

    Raises ModelLoadError for a folder that cannot be loaded, UnsupportedModel for a model or number
    format that the executor does not support.
    """
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelLoadError(
            f"{path} has no *.safetensors files; transformers' save_pretrained writes them from"
            " weights in another format"
        )
    target = select_device(device)
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    logger.info("reading %s of weights from %s", size(num_bytes), path)
    register_attention()
    transformers_logging.disable_progress_bar()
    with _named(str(path), target):
        _check_config(path)
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
        architecture = read_architecture(config.get_text_config())
        is_widened = is_quantised(path, config) and not keeps_eight_bit
    narrower = _KEEP_NARROW if is_widened else _HALF if _is_wide(config, dtype) else ""
    with _named(f"{path}: {architecture.name}", target, narrower):
        module = _load_module(path, config, dtype, target, keeps_eight_bit=keeps_eight_bit)
        module.eval().requires_grad_(False)
        move_module(module, target)
        weight = next(module.get_input_embeddings().parameters())
    try:
        with _named(f"{path}: a test step of {architecture.name}", target):
            probed = probe_model(module, architecture, weight.dtype)
    except UnsupportedModel as error:
        if architecture.name in str(error):
            raise
        raise UnsupportedModel(f"{architecture.name}: {error}") from error
    return LoadedModel(
        module=module,
        architecture=probed.architecture,
        shapes=probed.shapes,
        scorings=probed.scorings,
        vocab_size=probed.vocab_size,
        num_embeddings=weight.shape[0],
        dtype=weight.dtype,
        device=weight.device,
    )


@contextmanager
def _named(subject: str, device: torch.device, narrower: str = "") -> Generator[None]:
    """Convert any other error than ModelLoadError and UnsupportedModel to a ModelLoadError that
    starts with `subject`.

    `narrower`: the setting that an out-of-memory error recommends first, followed by a comma and a
    space, or "".
    """
    try:
        yield
    except (ModelLoadError, UnsupportedModel):
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise ModelLoadError(
                f"{subject}: the weights need more memory than {device} has free: set {narrower}"
                f"a device with more free memory or a smaller model: {error}"
            ) from error
        # For other types the message alone is not readable, so the type is added.
        is_clear = isinstance(error, OSError | ValueError | RuntimeError | SafetensorError)
        reason = str(error) if is_clear else f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"{subject}: {reason}") from error


def _is_wide(config: Any, dtype: str) -> bool:
    """Return whether weights are loaded in float32. `dtype`: see `load_model`."""
    stored: Any = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return dtype == "float32" or (dtype == "auto" and stored in (None, torch.float32))


def _load_module(
    path: Path, config: Any, dtype: str, device: torch.device, *, keeps_eight_bit: bool
) -> Any:
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    if not is_quantised(path, config):
        check_not_quantised(path)
        return _load_tensors(path, config, dtype=wanted or "auto")
    checkpoint = read_quantised(path, config, wanted)
    if hasattr(config, "quantization_config"):  # transformers needs another package for this model
        del config.quantization_config
    module = _load_tensors(path, config, dtype=checkpoint.dtype, state_dict=checkpoint.tensors)
    _place_stored(module, checkpoint.stored, device, keeps_eight_bit=keeps_eight_bit)
    return module


def _place_stored(
    module: Any, stored: dict[str, StoredWeight], device: torch.device, *, keeps_eight_bit: bool
) -> None:
    """Copy the quantised weights to the device one by one.

    With `keeps_eight_bit`, the weights of linear layers other than the head stay in 8 bits; the
    other weights are converted to the model's dtype. Raises UnsupportedModel for a weight without a
    module.
    """
    total = sum(one.values.nbytes for one in stored.values())
    progress = LoadProgress(f"loading 8-bit weights onto {device}", total)
    head = module.get_output_embeddings()
    for name, one in stored.items():
        try:
            owner = module.get_submodule(name)
        except AttributeError as error:
            reason = f"{name}.weight is in 8 bits, and the model has no linear of this name"
            raise UnsupportedModel(reason) from error
        if not bool(owner.weight[0, 0].isnan()):
            continue  # tied to a weight that is not 8-bit
        values, scale = one.values.to(device), one.scale.to(device)
        if keeps_eight_bit and type(owner) is nn.Linear and owner is not head:
            module.set_submodule(name, EightBitLinear(owner, values, scale))
        else:
            owner.weight.data = widen(values, scale, owner.weight.dtype)
        progress.add(values.nbytes)
    progress.finish()


def _load_tensors(path: Path, config: Any, **arguments: Any) -> Any:
    """Return the model with tensors from `path`, or from `state_dict` if it is among `arguments`.
    Raises ModelLoadError naming tensors that are missing or have another shape, UnsupportedModel if
    the model does not use the attention interface.
    """
    is_given = "state_dict" in arguments
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if is_given else AutoModelForCausalLM
    try:
        loaded: Any = family.from_pretrained(
            None if is_given else path,
            config=config,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # missing weights are reported below, by name
            **arguments,
        )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        name = config.get_text_config().model_type
        raise UnsupportedModel(f"{name} does not use the attention interface") from error
    module, found = loaded
    # transformers fills missing or mismatched weights with random numbers and a warning.
    entries: list[Any] = list(found.get("mismatched_keys", ()))
    # Only names before transformers 5; since then names with both shapes.
    mismatched = {entry if isinstance(entry, str) else str(entry[0]) for entry in entries}
    absent = sorted(mismatched.union(found.get("missing_keys", ())))
    if absent:
        raise ModelLoadError(f"{path}: no weights, or of another shape, for {', '.join(absent)}")
    return module


def _check_config(path: Path) -> None:
    """Raise ValueError for an architecture that this version of transformers does not support, or a
    quantization_config that is not an object.

    Done here because transformers' own messages contain unsuitable advice or only name a type.
    """
    try:
        values: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return  # transformers' message describes the error in the file
    if not isinstance(values, dict):
        return
    fields = cast("dict[str, Any]", values)
    model_type, settings = fields.get("model_type"), fields.get(CONFIG)
    if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} does not know the architecture {model_type!r}"
        )
    if not isinstance(settings, dict | None):
        raise ValueError(f"{CONFIG} must be an object, not {json.dumps(settings)}")


def select_device(device: str) -> torch.device:
    """Return the device of this name. A CUDA device is returned with its index, and becomes the
    current device, as pinned host memory and libraries require.

    Raises ModelLoadError when the device does not exist.
    """
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ModelLoadError(
            f"device {device} requires CUDA, which PyTorch does not find here: use device cpu"
        )
    count = torch.cuda.device_count()
    index = found.index if ":" in device else torch.cuda.current_device()
    if index >= count:
        raise ModelLoadError(
            f"device {device} does not exist: PyTorch finds {count} CUDA device(s) here"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def move_module(
    module: nn.Module, device: torch.device, clock: Callable[[], float] = time.monotonic
) -> None:
    """Move every parameter and buffer to `device`, and log the progress. A parameter that modules
    share is moved once and stays shared.
    """
    total = _bytes_away(module, device)
    if not total:
        return
    progress = LoadProgress(f"loading onto {device}", total, clock)
    for part in module.modules():
        if next(part.children(), None) is not None:
            continue
        num_bytes = _bytes_away(part, device)
        part.to(device)
        progress.add(num_bytes)
    module.to(device)  # parameters of modules that also have children
    progress.finish()


def _bytes_away(module: nn.Module, device: torch.device) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.nbytes for tensor in tensors if tensor.device != device)
