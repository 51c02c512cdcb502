"""Reads the quantisation settings of a model folder, from quantization_config in config.json or
from ModelOpt's hf_quant_config.json.

Accepts 8-bit weights of compressed-tensors and ModelOpt, symmetric, with one scale per tensor or
per output channel.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.executor.torch.errors import UnsupportedModel

CONFIG, FILE = "quantization_config", "hf_quant_config.json"
_METHODS = ("compressed-tensors", "modelopt")
_STRATEGIES = ("tensor", "channel")
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_READ = ("quant_method", "config_groups", "sparsity_config", "quant_algo")
_IGNORED = (
    "exclude_modules",
    "format",
    "global_compression_ratio",
    "ignore",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "producer",
    "quantization_status",
    "run_compressed",
    "version",
)
"""Fields that do not change how a stored weight is read: the tensors show which are in 8 bits."""


def quantisation_method(path: Path, config: Any) -> str | None:
    """Return the quantisation method of a folder, None if it names none.

    `config`: its transformers configuration. Raises UnsupportedModel naming the field or file for
    another method, number format or an unknown field.
    """
    settings = _settings(config)
    method = settings.get("quant_method")
    if method is None and (path / FILE).is_file():
        method = "modelopt"
    if method is None and not settings:
        return None
    if method not in _METHODS:
        raise UnsupportedModel(
            f"{CONFIG}.quant_method {method}: {' and '.join(_METHODS)} alone are read"
        )
    if method == "modelopt":
        _check_modelopt(path, settings)
    else:
        _check_compressed_tensors(settings)
    return cast("str", method)


def _check_modelopt(path: Path, settings: Mapping[str, Any]) -> None:
    name = CONFIG
    if (path / FILE).is_file():
        name = f"{FILE}: quantization"
        settings = _object(name, _read_file(path / FILE).get("quantization"))
    algorithm = settings.get("quant_algo")
    if algorithm not in _MODELOPT_ALGORITHMS:
        raise UnsupportedModel(f"ModelOpt's quant_algo {algorithm}: only FP8 is supported")
    _check_fields(name, settings)


def _read_file(file: Path) -> Mapping[str, Any]:
    try:
        return _object(file.name, json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UnsupportedModel(f"{file.name} is not valid JSON: {error}") from error


def _check_compressed_tensors(settings: Mapping[str, Any]) -> None:
    name = f"{CONFIG}.config_groups"
    for key, group in _object(name, settings.get("config_groups") or {}).items():
        weights = _object(f"{name}.{key}", group).get("weights")
        _check_weights(f"{name}.{key}.weights", weights)
    _check_fields(CONFIG, settings)


def _check_weights(name: str, weights: object) -> None:
    weights = _object(name, weights)
    if weights.get("num_bits") != 8:
        raise UnsupportedModel(f"{name}: {weights.get('num_bits')} bits; only 8 are supported")
    if weights.get("strategy") not in _STRATEGIES:
        raise UnsupportedModel(f"{name}: strategy {weights.get('strategy')}, not tensor or channel")
    if not weights.get("symmetric", True):
        raise UnsupportedModel(f"{name}: zero points are not read")


def _check_fields(name: str, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if value and key not in (*_READ, *_IGNORED):
            raise UnsupportedModel(f"{name}.{key} is not supported")
    sparsity = _object(f"{name}.sparsity_config", settings.get("sparsity_config") or {})
    if sparsity and sparsity.get("format") != "dense":
        raise UnsupportedModel(
            f"{name}.sparsity_config.format {sparsity.get('format')}: only dense is supported"
        )


def _settings(config: Any) -> Mapping[str, Any]:
    found: Any = getattr(config, CONFIG, None)
    if found is not None and hasattr(found, "to_dict"):
        found = found.to_dict()
    return _object(CONFIG, {} if found is None else found)


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"{name} must be an object, not {json.dumps(value, default=str)}")
    return cast("Mapping[str, Any]", value)
