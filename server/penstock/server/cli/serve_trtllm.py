"""The part of `penstock serve` that is about TensorRT-LLM: its section, and flags it replaces.

Owns where the section comes from, which of the common flags have a name of their own there, and
the agreement of the two. What the keys mean, their dataclasses know.
"""

import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.executor.config_json import from_json_value, parse_json
from penstock.executor.trtllm.config import TrtllmConfig
from penstock.executor.trtllm.preflight import check_before_load, check_tokenizer
from penstock.server.logs.rate import ALWAYS

log = logging.getLogger(__name__)

SECTION = "trtllm-config"
_KEYS = {
    "max-num-seqs": "max_batch_size",
    "max-num-batched-tokens": "max_num_tokens",
    "max-seq-len": "max_seq_len",
    "admission-policy": "scheduler_config.capacity_scheduler_policy",
    "block-size": "kv_cache_config.tokens_per_block",
    "num-blocks": "kv_cache_config.max_tokens",
    "kv-cache-mib": "kv_cache_config.free_gpu_memory_fraction",
    "kv-memory-fraction": "kv_cache_config.free_gpu_memory_fraction",
    "dtype": "dtype",
    "kv-cache-dtype": "kv_cache_config.dtype",
    "pipeline-depth": "disable_overlap_scheduler",
}
"""Flags of the other executors, and the key that stands for each."""
_OWN_PACE = "the engine plans its own steps"
_OWN_CACHE = "the engine evicts its own blocks, and knows retention but no sessions"
_MEANINGLESS = {
    "device": "GPUs are chosen by CUDA_VISIBLE_DEVICES and tensor_parallel_size",
    "threads": "nothing is computed on the CPU",
    "quantization": "the checkpoint is quantised before it is served, or not at all",
    "target-itl-ms": _OWN_PACE,
    "max-prefill-share": _OWN_PACE,
    "foresee-deadlines": _OWN_PACE,
    "min-deadline-chance": _OWN_PACE,
    "step-prices": _OWN_PACE,
    "eviction": _OWN_CACHE,
    "max-session-share": _OWN_CACHE,
    "max-session-tokens": _OWN_CACHE,
}


def trtllm_config(settings: Mapping[str, Any]) -> TrtllmConfig:
    """The section, read and held against the flags. Raises ValueError naming flag or key path."""
    for flag, key in _KEYS.items():
        if settings[_name(flag)] is not None:
            raise ValueError(f"{flag}: for the trtllm executor set {key} in --{SECTION}")
    for flag, reason in _MEANINGLESS.items():
        if settings[_name(flag)] is not None:
            raise ValueError(f"{flag} means nothing to the trtllm executor: {reason}")
    config = read_section(settings[_name(SECTION)])
    caching, reuse = settings["prefix_caching"], config.kv_cache_config.enable_block_reuse
    if caching is not None and (caching == "on") is not reuse:
        raise ValueError(
            f"prefix-caching is {caching} and {SECTION}.kv_cache_config.enable_block_reuse is"
            f" {str(reuse).lower()}: they must agree"
        )
    return config


def read_section(text: str | None) -> TrtllmConfig:
    """From a JSON object, or from a .json or .toml file. Raises ValueError naming the key path."""
    data: Any = {}
    if text is not None:
        data = _parse_inline(text) if text.lstrip().startswith("{") else _parse_file(Path(text))
    return from_json_value(TrtllmConfig, data, SECTION)


def check_model(model_path: Path, config: TrtllmConfig, tokenizer_path: Path | None) -> None:
    """Find what is wrong before the long load, and log what is odd. Raises ValueError."""
    findings = check_before_load(model_path, config, os.environ)
    check_tokenizer(findings.folder, tokenizer_path)
    log.info("%s", findings.folder.explanation)
    for notice in findings.notices:
        log.warning("%s", notice, extra=ALWAYS)


def _parse_inline(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{SECTION} is no JSON: {error}") from error


def _parse_file(path: Path) -> Any:
    parsers: Mapping[str, Callable[[str], Any]] = {".json": parse_json, ".toml": tomllib.loads}
    parse = parsers.get(path.suffix)
    if parse is None:
        raise ValueError(f"{SECTION} must be a JSON object or a .json or .toml file, not {path}")
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{SECTION}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of JSON, of TOML, and of bytes that are no UTF-8
        raise ValueError(f"{SECTION}: {path} is no {path.suffix[1:].upper()}: {error}") from error
    except RecursionError as error:  # of TOML
        raise ValueError(f"{SECTION}: {path} is nested too deep") from error


def _name(flag: str) -> str:
    return flag.replace("-", "_")
