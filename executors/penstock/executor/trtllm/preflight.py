"""Checks the settings before the model is loaded, because loading takes minutes.

Compares the settings with the files that they refer to and with the visible GPUs. Reads small files
only; TensorRT-LLM is located, not imported.
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock.executor.trtllm.config import MAX_INT32, AdapterConfig, LoraSettings, TrtllmConfig
from penstock.executor.trtllm.model_kind import ModelFolder, ModelKind, read_json_object, recognise

_LEAST_SEQ_LEN = 2
"""Minimum `max_seq_len`: one prompt token and one output token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The result of the checks: the model folder, and notices about unusual settings, one sentence
    each.
    """

    folder: ModelFolder
    notices: tuple[str, ...]


def check_before_load(
    model_path: Path, config: TrtllmConfig, environment: Mapping[str, str]
) -> Findings:
    """Check the settings against the model folder, the folders of adapters and draft model, and the
    GPUs in CUDA_VISIBLE_DEVICES of `environment`, if it is set.

    Raises ValueError naming the setting, or explaining why the model folder cannot be served.
    """
    folder = recognise(model_path)
    if folder.kind in (ModelKind.UNKNOWN, ModelKind.CHECKPOINT):
        raise ValueError(folder.explanation)
    _check_gpus(config, environment)
    _check_sizes(folder, config)
    if folder.is_engine:
        _check_engine(folder, config)
    _check_adapters(config.lora_config)
    _check_speculative(config)
    return Findings(folder=folder, notices=tuple(_notices(folder, config)))


def check_tokenizer(folder: ModelFolder, tokenizer_path: Path | None) -> None:
    """Check that the tokenizer's folder (None: the model folder) has a tokenizer.json and, if it is
    another folder, that it is a Hugging Face folder with the model's vocabulary size, if both sizes
    are known. Raises ValueError.
    """
    path = tokenizer_path or folder.path
    if not (path / "tokenizer.json").is_file():
        if tokenizer_path is None:
            raise ValueError(
                f"tokenizer must be given: {path} has no tokenizer.json; name the folder of the"
                " Hugging Face model (its weights are not needed)"
            )
        raise ValueError(f"tokenizer: {path} has no tokenizer.json")
    if tokenizer_path is None:
        return
    text = recognise(tokenizer_path)
    if text.kind not in (ModelKind.HUGGING_FACE, ModelKind.QUANTISED):
        raise ValueError(f"tokenizer must be a Hugging Face folder: {text.explanation}")
    if None not in (text.vocab_size, folder.vocab_size) and text.vocab_size != folder.vocab_size:
        raise ValueError(
            f"tokenizer: {path} belongs to a model with {text.vocab_size} token ids,"
            f" {folder.path} has {folder.vocab_size}"
        )


def _notices(folder: ModelFolder, config: TrtllmConfig) -> list[str]:
    notices: list[str] = []
    if folder.quantisation is not None and not folder.quantisation.is_readable:
        notices.append(folder.explanation)
    asked_for, own = config.max_seq_len, folder.max_seq_len
    if asked_for is not None and own is not None and asked_for > own:
        notices.append(f"max_seq_len is {asked_for}, beyond the {own} that the model was made for")
    longest = asked_for or own or 0
    if not config.enable_chunked_prefill and longest > config.max_num_tokens:
        notices.append(
            "without enable_chunked_prefill, prompts above max_num_tokens"
            f" ({config.max_num_tokens}) are rejected"
        )
    installed = _installed_version() if folder.is_engine else None
    if None not in (installed, folder.built_by) and installed != folder.built_by:
        notices.append(
            f"the engine was built by TensorRT-LLM {folder.built_by}; {installed} is installed and"
            " may fail to load it"
        )
    return notices


def _check_gpus(config: TrtllmConfig, environment: Mapping[str, str]) -> None:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return
    num_visible = len([name for name in visible.split(",") if name.strip()])
    if config.world_size > num_visible:
        raise ValueError(
            "tensor_parallel_size times pipeline_parallel_size is"
            f" {config.world_size} GPUs; CUDA_VISIBLE_DEVICES shows {num_visible}"
        )


def _check_sizes(folder: ModelFolder, config: TrtllmConfig) -> None:
    """Check the vocabulary size and the maximum sequence length, because loading does not check
    them. Raises ValueError if one is invalid.
    """
    if not 1 <= (folder.vocab_size or 0) <= MAX_INT32:
        size = "no" if folder.vocab_size is None else f"{folder.vocab_size} as the"
        raise ValueError(f"{folder.path}: config.json gives {size} vocab_size")
    longest = config.max_seq_len or folder.max_seq_len
    if longest is None:
        raise ValueError(
            f"max_seq_len must be given: config.json of {folder.path} has no length"
            " (max_position_embeddings)"
        )
    if not _LEAST_SEQ_LEN <= longest <= MAX_INT32:
        raise ValueError(
            f"max_seq_len must be given: config.json of {folder.path} has a length of {longest}"
        )


def _check_engine(folder: ModelFolder, config: TrtllmConfig) -> None:
    """Raise ValueError if the engine was built for other sizes than the settings require, or the
    installed TensorRT-LLM has no TensorRT backend.
    """
    spec = importlib.util.find_spec("tensorrt_llm")
    places = spec.submodule_search_locations if spec is not None else None
    # If the package is missing, the executor reports what to install.
    if places is not None and not any((Path(p) / "_tensorrt_engine").exists() for p in places):
        raise ValueError(
            f"{folder.explanation}; the installed tensorrt_llm has no TensorRT backend"
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        built_for, wanted = getattr(folder, name), getattr(config, name)
        if built_for not in (None, wanted):
            raise ValueError(f"{name} must be {built_for}, the engine's, not {wanted}")
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        most, wanted = getattr(folder, name), getattr(config, name)
        if None not in (most, wanted) and wanted > most:
            raise ValueError(f"{name} must be at most {most}, the engine's, not {wanted}")
    block, wanted = folder.tokens_per_block, config.kv_cache_config.tokens_per_block
    if block not in (None, wanted):
        raise ValueError(
            f"kv_cache_config.tokens_per_block must be {block}, the engine's, not {wanted}"
        )


def _check_speculative(config: TrtllmConfig) -> None:
    draft = (
        None if config.speculative_config is None else config.speculative_config.speculative_model
    )
    if draft is not None and not (draft / "config.json").is_file():
        raise ValueError(f"speculative_config.speculative_model: {draft} contains no config.json")


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_adapters(settings: LoraSettings) -> None:
    """Raise ValueError if an adapter cannot be read, has too high a rank, or, without
    `lora_target_modules`, changes layers that the first adapter does not change.
    """
    first: frozenset[str] | None = None
    for index, adapter in enumerate(settings.adapters):
        where = f"lora_config.adapters[{index}]"
        values = _adapter_config(adapter, where)
        rank = values.get("r")
        if isinstance(rank, int) and rank > settings.max_lora_rank:
            raise ValueError(
                f"{where}.path: {adapter.path} has rank {rank}, above lora_config.max_lora_rank"
                f" ({settings.max_lora_rank})"
            )
        targets = values.get("target_modules")
        if settings.lora_target_modules or not isinstance(targets, list):
            continue
        names = frozenset(map(str, cast("list[object]", targets)))
        if first is not None and not names <= first:
            raise ValueError(
                f"{where}.path: {adapter.path} changes {', '.join(sorted(names - first))}, which"
                " the first adapter does not: name all layers in lora_config.lora_target_modules"
            )
        first = names if first is None else first


def _adapter_config(adapter: AdapterConfig, where: str) -> Mapping[str, object]:
    file = adapter.path / "adapter_config.json"
    try:
        return read_json_object(file)
    except OSError as error:
        raise ValueError(f"{where}.path: {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{where}.path: {adapter.path}: {error}") from error
