"""Converts Penstock's settings to the arguments of TensorRT-LLM's LLM constructor.

A setting that the installed version lacks is left out. If the operator changed it or Penstock
depends on it, an error is raised instead. `config` has already checked the ranges of the settings.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.executor.trtllm.config import (
    CudaGraphSettings,
    DecodingType,
    KvCacheSettings,
    LoraSettings,
    SchedulerSettings,
    SpeculativeSettings,
    TrtllmConfig,
)
from penstock.executor.trtllm.model_kind import ModelFolder
from penstock.executor.trtllm.package import Package

_PLAIN = (
    "dtype",
    "trust_remote_code",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_seq_len",
    "enable_chunked_prefill",
    "disable_overlap_scheduler",
    "attn_backend",
    "sampler_type",
    "guided_decoding_backend",
)
"""Settings that are passed unchanged, under the same name."""

_DECODING_CLASSES = {
    DecodingType.NGRAM: "NGramDecodingConfig",
    DecodingType.EAGLE: "EagleDecodingConfig",
    DecodingType.MTP: "MTPDecodingConfig",
    DecodingType.DRAFT_TARGET: "DraftTargetDecodingConfig",
    DecodingType.AUTO: "AutoDecodingConfig",
}
_MAX_STATS = 1000
_NGRAM_MATCH = 2
"""Default of `max_matching_ngram_size` in later versions; the 0 of 1.2 never matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """The value of one argument of TensorRT-LLM. `is_explicit`: it must not be omitted silently,
    because the operator set it or Penstock depends on it.
    """

    value: Any
    is_explicit: bool


def llm_arguments(
    config: TrtllmConfig, folder: ModelFolder, package: Package, *, tokenizer_path: Path | None
) -> dict[str, Any]:
    """Return the keyword arguments for `package.build`.

    The engine gets a tokenizer, from `tokenizer_path` or else from the model folder, only for
    structured output: fronts (gRPC server processes) do all other conversion of text. Statistics
    are always enabled, because the engine's actual limits are read from them.

    Raises ValueError naming a setting, or ExecutorUnavailable naming a class, that the installed
    version lacks.
    """
    default = TrtllmConfig()
    settings: dict[str, _Argument] = {
        "model": _Argument(value=str(folder.path), is_explicit=True),
        # Penstock's scheduler fills the engine up to these limits.
        "max_batch_size": _Argument(value=config.max_batch_size, is_explicit=True),
        "max_num_tokens": _Argument(value=config.max_num_tokens, is_explicit=True),
        # Engines built ahead always report statistics.
        "enable_iter_perf_stats": _Argument(value=True, is_explicit=not folder.is_engine),
        # Limits the queue of unread statistics; versions without this argument keep all of them.
        "max_stats_len": _Argument(value=_MAX_STATS, is_explicit=False),
        **_tokenizer_arguments(config, tokenizer_path or folder.path),
    }
    for name in _PLAIN:
        value = getattr(config, name)
        if value is not None:
            is_explicit = value != getattr(default, name)
            settings[name] = _Argument(value=_plain(value), is_explicit=is_explicit)
    settings.update(_sections(config, default, package))
    return _fitted(settings, package.llm_arguments, f"tensorrt_llm {package.version}", "")


def _tokenizer_arguments(config: TrtllmConfig, tokenizer: Path) -> dict[str, _Argument]:
    if config.guided_decoding_backend is None:
        return {"skip_tokenizer_init": _Argument(value=True, is_explicit=True)}
    return {"tokenizer": _Argument(value=str(tokenizer), is_explicit=True)}


def _sections(
    config: TrtllmConfig, default: TrtllmConfig, package: Package
) -> dict[str, _Argument]:
    """Return the arguments whose values are objects of TensorRT-LLM's configuration classes. A
    value is None if the installed version lacks the argument, or for disabled CUDA graphs.
    """
    builders: dict[str, Callable[[], Any]] = {
        "kv_cache_config": lambda: _kv_cache(config.kv_cache_config, package),
        "scheduler_config": lambda: _scheduler(config.scheduler_config, package),
        "cuda_graph_config": lambda: _cuda_graph(config.cuda_graph_config, package),
    }
    if config.lora_config.adapters:
        builders["lora_config"] = lambda: _lora(config.lora_config, package)
    speculative = config.speculative_config
    if speculative is not None:
        builders["speculative_config"] = lambda: _speculative(speculative, package)
    return {
        name: _Argument(
            value=build() if name in package.llm_arguments else None,
            is_explicit=getattr(config, name) != getattr(default, name),
        )
        for name, build in builders.items()
    }


def _kv_cache(settings: KvCacheSettings, package: Package) -> Any:
    names = (
        "free_gpu_memory_fraction",
        "max_tokens",
        "tokens_per_block",
        "enable_block_reuse",
        "enable_partial_reuse",
        "host_cache_size",
        "dtype",
    )
    return _built(
        package, "KvCacheConfig", "kv_cache_config", _given(settings, KvCacheSettings(), names)
    )


def _scheduler(settings: SchedulerSettings, package: Package) -> Any:
    where = "scheduler_config"
    policy = settings.capacity_scheduler_policy
    values = {
        "capacity_scheduler_policy": _Argument(
            value=_member(package, "CapacitySchedulerPolicy", policy, where), is_explicit=True
        )
    }
    chunking = settings.context_chunking_policy
    if chunking is not None:
        member = _member(package, "ContextChunkingPolicy", chunking, where)
        values["context_chunking_policy"] = _Argument(value=member, is_explicit=True)
    if "priority" in package.generate_arguments:
        # Without this policy, the engine accepts a request's priority and ignores it.
        values["waiting_queue_policy"] = _Argument(value="priority", is_explicit=False)
    return _built(package, "SchedulerConfig", where, values)


def _cuda_graph(settings: CudaGraphSettings, package: Package) -> Any:
    """Return the engine's CudaGraphConfig, or None to disable CUDA graphs."""
    if not settings.enabled:
        return None
    names = ("batch_sizes", "max_batch_size", "enable_padding")
    values = _given(settings, CudaGraphSettings(), names)
    # The engine accepts only one of the two; the batch sizes imply the maximum.
    values.pop("max_batch_size" if settings.batch_sizes else "batch_sizes", None)
    return _built(package, "CudaGraphConfig", "cuda_graph_config", values)


def _lora(settings: LoraSettings, package: Package) -> Any:
    num_adapters = len(settings.adapters)
    values: dict[str, Any] = {
        "max_lora_rank": settings.max_lora_rank,
        "max_loras": settings.max_loras or num_adapters,
        "max_cpu_loras": settings.max_cpu_loras or num_adapters,
    }
    # The engine reads the list of adapted layers from one folder (it accepts only one). Without a
    # folder or the setting, it allocates memory for every layer.
    if settings.lora_target_modules:
        values["lora_target_modules"] = list(settings.lora_target_modules)
    else:
        values["lora_dir"] = [str(settings.adapters[0].path)]
    arguments = {name: _Argument(value=value, is_explicit=True) for name, value in values.items()}
    return _built(package, "LoraConfig", "lora_config", arguments)


def _speculative(settings: SpeculativeSettings, package: Package) -> Any:
    class_name = _DECODING_CLASSES[settings.decoding_type]
    names = ("max_draft_len", "max_matching_ngram_size", "num_nextn_predict_layers")
    values = _given(settings, None, names)
    if settings.decoding_type is DecodingType.NGRAM:
        values.setdefault(
            "max_matching_ngram_size", _Argument(value=_NGRAM_MATCH, is_explicit=False)
        )
    # Without this argument, release 1.2 samples greedily whenever drafting runs inside the model,
    # whatever the request; later versions detect the options themselves (NVIDIA PR #14745).
    values["allow_advanced_sampling"] = _Argument(value=True, is_explicit=False)
    if settings.decoding_type is DecodingType.EAGLE:
        values["eagle3_one_model"] = _Argument(
            value=settings.eagle3_one_model, is_explicit=not settings.eagle3_one_model
        )
    if settings.speculative_model is not None:
        # Release 1.2 has "dir" in the argument's name.
        taken = _taken_by(package.named(class_name))
        name = "speculative_model" if "speculative_model" in taken else "speculative_model_dir"
        values[name] = _Argument(value=str(settings.speculative_model), is_explicit=True)
    return _built(package, class_name, "speculative_config", values)


def _given(settings: object, default: object, names: Collection[str]) -> dict[str, _Argument]:
    """Return the fields of `settings` that are in `names` and not None. `is_explicit` is True if
    the field's value differs from its value in `default`, or if `default` is None.
    """
    values = {name: getattr(settings, name) for name in names}
    return {
        name: _Argument(
            value=_plain(value),
            is_explicit=default is None or value != getattr(default, name),
        )
        for name, value in values.items()
        if value is not None
    }


def _built(package: Package, class_name: str, where: str, values: Mapping[str, _Argument]) -> Any:
    kind = package.named(class_name)
    owner = f"{class_name} of tensorrt_llm {package.version}"
    return kind(**_fitted(values, _taken_by(kind), owner, f"{where}."))


def _fitted(
    settings: Mapping[str, _Argument], taken: Collection[str], owner: str, where: str
) -> dict[str, Any]:
    """Return the values of the settings in `taken`, the names of the arguments that `owner`
    accepts.

    Raises ValueError if a setting that is not in `taken` must not be omitted (`is_explicit`).
    `where`: the prefix of its name in the error.
    """
    for name, setting in settings.items():
        if name not in taken and setting.is_explicit:
            raise ValueError(f"{where}{name} cannot be set: {owner} does not have it")
    return {name: setting.value for name, setting in settings.items() if name in taken}


def _taken_by(kind: Any) -> frozenset[str]:
    """Return the arguments that a class accepts: a pydantic model's field names, else the
    constructor's parameters.
    """
    fields = getattr(kind, "model_fields", None)
    return frozenset(inspect.signature(kind).parameters if fields is None else fields)


def _member(package: Package, class_name: str, name: str, where: str) -> Any:
    """Return the member `name` of the enum `class_name`, by attribute access: TensorRT-LLM's enums
    are native classes without lookup by name. Raises ValueError if the installed version lacks it.
    """
    member = getattr(package.named(class_name), name, None)
    if member is None:
        raise ValueError(
            f"{where} cannot be set to {name}: tensorrt_llm {package.version} does not have it"
        )
    return member


def _plain(value: Any) -> Any:
    """Convert a string enum to a plain string and a tuple to a list, because TensorRT-LLM's
    pydantic models check types.
    """
    if isinstance(value, str):
        return str(value)
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
