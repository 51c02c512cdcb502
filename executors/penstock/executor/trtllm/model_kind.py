"""Recognises the kind of a model folder from its small files, before anything is loaded.

Also reads the sizes and the quantisation, and explains to the operator how the folder can be used.
Reads no weights, and imports no large packages.
"""

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

_MAX_FILE_BYTES = 64 << 20
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_RANK_FILE = re.compile(r"rank\d+\.(engine|safetensors)")


class ModelKind(enum.Enum):
    """The kinds of folders that TensorRT-LLM uses."""

    HUGGING_FACE = "Hugging Face model"
    QUANTISED = "quantised Hugging Face model"
    CHECKPOINT = "TensorRT-LLM checkpoint"
    ENGINE = "TensorRT engine"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How weights are stored.

    `algorithm`: the name that the checkpoint's configuration or the engine has for it ("FP8",
    "NVFP4", "W4A16_AWQ"), else the method and the number of bits. `kv_cache`: the quantisation of
    the KV cache, None if it is unknown or there is none. `is_readable`: whether the PyTorch backend
    of release 1.2 can load weights in this format.
    """

    algorithm: str
    kv_cache: str | None = None
    is_readable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model folder: its kind and properties. `explanation`: one sentence for the operator.

    `max_seq_len` is in tokens. Engines and checkpoints have parallel sizes. The maximum sizes and
    `tokens_per_block` are the values that an engine was built for. `built_by`: the TensorRT-LLM
    version that built the engine. A field is None if it is unknown or does not apply.
    """

    path: Path
    kind: ModelKind
    explanation: str
    quantisation: Quantisation | None = None
    vocab_size: int | None = None
    max_seq_len: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    tokens_per_block: int | None = None
    built_by: str | None = None

    @property
    def is_engine(self) -> bool:
        """True if the folder contains an engine built ahead of time. It does not use the PyTorch
        backend.
        """
        return self.kind is ModelKind.ENGINE


def recognise(path: Path) -> ModelFolder:
    """Return the kind and properties of a folder. A folder that cannot be read or is not recognised
    has the kind UNKNOWN, and its `explanation` gives the reason.
    """
    try:
        if not path.is_dir():
            return _unknown(path, f"{path} is not a folder")
        if not (path / "config.json").is_file():
            return _unknown(path, f"{path} contains no config.json")
        config = read_json_object(path / "config.json")
        ranks = {match[1] for item in path.iterdir() if (match := _RANK_FILE.fullmatch(item.name))}
        if "pretrained_config" in config and "build_config" in config:
            return _engine(path, config, has_engines="engine" in ranks)
        if isinstance(config.get("architecture"), str) and "mapping" in config:
            return _checkpoint(path, config, has_weights="safetensors" in ranks)
        if "model_type" in config or "architectures" in config:
            return _hugging_face(path, config)
    except (OSError, ValueError) as error:
        return _unknown(path, f"{path} cannot be read: {error}")
    return _unknown(
        path,
        f"{path} is neither a Hugging Face model nor a TensorRT-LLM checkpoint or engine: its"
        " config.json has no model_type",
    )


def _unknown(path: Path, explanation: str) -> ModelFolder:
    return ModelFolder(path=path, kind=ModelKind.UNKNOWN, explanation=explanation)


def _hugging_face(path: Path, config: Mapping[str, object]) -> ModelFolder:
    text = _child(config, "text_config")
    found = _modelopt(path) or _other_quantisation(config) or _other_quantisation(text)
    return ModelFolder(
        path=path,
        kind=ModelKind.HUGGING_FACE if found is None else ModelKind.QUANTISED,
        explanation=_hugging_face_sentence(path, found),
        quantisation=found,
        vocab_size=_integer(text, "vocab_size") or _integer(config, "vocab_size"),
        max_seq_len=_max_positions(text) or _max_positions(config),
    )


def _hugging_face_sentence(path: Path, found: Quantisation | None) -> str:
    if found is None:
        return f"{path} is a Hugging Face model: the PyTorch backend serves it unchanged"
    cache = "" if found.kv_cache is None else f" with a KV cache in {found.kv_cache}"
    if found.is_readable:
        return (
            f"{path} is a Hugging Face model quantised to {found.algorithm}{cache}: the PyTorch"
            " backend reads that from the checkpoint and serves it unchanged"
        )
    return (
        f"{path} is a Hugging Face model quantised to {found.algorithm}{cache}, in a format that"
        " the PyTorch backend of release 1.2 does not read: loading will most likely fail; quantise"
        " the original with NVIDIA's ModelOpt, which writes hf_quant_config.json"
    )


def _checkpoint(path: Path, config: Mapping[str, object], *, has_weights: bool) -> ModelFolder:
    if not has_weights:
        return _unknown(
            path, f"{path} looks like a TensorRT-LLM checkpoint but contains no rank0.safetensors"
        )
    mapping = _child(config, "mapping")
    return ModelFolder(
        path=path,
        kind=ModelKind.CHECKPOINT,
        explanation=(
            f"{path} is a TensorRT-LLM checkpoint, which must be built first: run `penstock build`"
            " and serve the folder that it prints, or serve the Hugging Face model that the"
            " checkpoint was made from"
        ),
        quantisation=_engine_quantisation(config),
        vocab_size=_integer(config, "vocab_size"),
        max_seq_len=_max_positions(config),
        tensor_parallel_size=_integer(mapping, "tp_size"),
        pipeline_parallel_size=_integer(mapping, "pp_size"),
    )


def _engine(path: Path, config: Mapping[str, object], *, has_engines: bool) -> ModelFolder:
    if not has_engines:
        return _unknown(path, f"{path} looks like a TensorRT engine but contains no rank0.engine")
    model, build = _child(config, "pretrained_config"), _child(config, "build_config")
    mapping, plugins = _child(model, "mapping"), _child(build, "plugin_config")
    version = config.get("version")
    built_by = version if isinstance(version, str) and version else None
    return ModelFolder(
        path=path,
        kind=ModelKind.ENGINE,
        explanation=(
            f"{path} is a TensorRT engine built by TensorRT-LLM {built_by or 'of unknown version'}:"
            " it runs on that version and on the kind of GPU it was built for, if the version has"
            " the TensorRT backend; otherwise serve the Hugging Face model"
        ),
        quantisation=_engine_quantisation(model),
        vocab_size=_integer(model, "vocab_size"),
        max_seq_len=_integer(build, "max_seq_len") or _max_positions(model),
        tensor_parallel_size=_integer(mapping, "tp_size"),
        pipeline_parallel_size=_integer(mapping, "pp_size"),
        max_batch_size=_integer(build, "max_batch_size"),
        max_num_tokens=_integer(build, "max_num_tokens"),
        tokens_per_block=_integer(plugins, "tokens_per_block"),
        built_by=built_by,
    )


def _modelopt(path: Path) -> Quantisation | None:
    """Return the quantisation in hf_quant_config.json, the file that ModelOpt writes; None if the
    file is missing or names no quantisation.
    """
    file = path / "hf_quant_config.json"
    if not file.exists():
        return None
    values = _child(read_json_object(file), "quantization")
    algorithm, cache = values.get("quant_algo"), values.get("kv_cache_quant_algo")
    if not isinstance(algorithm, str) and not isinstance(cache, str):
        return None
    return Quantisation(
        algorithm=algorithm if isinstance(algorithm, str) else "NO_QUANT",
        kv_cache=cache if isinstance(cache, str) else None,
    )


def _other_quantisation(config: Mapping[str, object]) -> Quantisation | None:
    """Return the quantisation in the `quantization_config` section of config.json, None if there is
    none. Most tools other than ModelOpt write this section.

    Release 1.2 reads only FP8 in blocks and MXFP4 (`ModelConfig.load_hf_quant_config`); it ignores
    others, and loading then fails because the weights do not fit the layers.
    """
    values = _child(config, "quantization_config")
    method = values.get("quant_method")
    if not isinstance(method, str):
        return None
    match method:
        case "fp8":
            is_in_blocks = bool(values.get("weight_block_size"))
            algorithm = "FP8_BLOCK_SCALES" if is_in_blocks else "FP8"
            return Quantisation(algorithm=algorithm, is_readable=is_in_blocks)
        case "mxfp4":
            return Quantisation(algorithm="MXFP4")
        case "modelopt":
            # Newer exports repeat the content of hf_quant_config.json here. If that file is
            # missing, only later releases read this section.
            named = values.get("quant_algo")
            name = named if isinstance(named, str) else "ModelOpt"
            return Quantisation(algorithm=name, is_readable=False)
        case "awq" | "gptq":
            bits = _integer(values, "bits") or _integer(values, "w_bit")
            width = "" if bits is None else f"INT{bits} "
            return Quantisation(algorithm=f"{width}{method.upper()}", is_readable=False)
        case "bitsandbytes":
            width = "INT8" if values.get("load_in_8bit") is True else "4 bits"
            return Quantisation(algorithm=f"{width} (bitsandbytes)", is_readable=False)
        case "compressed-tensors":
            scheme = values.get("format")
            detail = f", {scheme}" if isinstance(scheme, str) else ""
            name = f"{_compressed_widths(values)} (compressed-tensors{detail})".strip()
            return Quantisation(algorithm=name, is_readable=False)
        case _:
            return Quantisation(algorithm=method, is_readable=False)


def _compressed_widths(values: Mapping[str, object]) -> str:
    """Return a short name of the number formats in a compressed-tensors configuration.

    For integer weights, these are the bits of weights and activations, such as "W8A8" or "W4A16";
    for floating-point weights the format, such as "FP8" or "NVFP4". They are read from the first
    group that gives the bits of its weights; "" if there is none.
    """
    for group in _child(values, "config_groups").values():
        if not isinstance(group, dict):
            continue
        named = cast("dict[str, object]", group)
        weights, inputs = _child(named, "weights"), _child(named, "input_activations")
        bits = _integer(weights, "num_bits")
        if bits is None:
            continue
        if weights.get("type") == "float":
            return "NVFP4" if bits == 4 else f"FP{bits}"
        return f"W{bits}A{_integer(inputs, 'num_bits') or 16}"
    return ""


def _engine_quantisation(config: Mapping[str, object]) -> Quantisation | None:
    values = _child(config, "quantization")
    algorithm, cache = values.get("quant_algo"), values.get("kv_cache_quant_algo")
    if not isinstance(algorithm, str) and not isinstance(cache, str):
        return None
    return Quantisation(
        algorithm=algorithm if isinstance(algorithm, str) else "NO_QUANT",
        kv_cache=cache if isinstance(cache, str) else None,
    )


def read_json_object(path: Path) -> Mapping[str, object]:
    """Read a file with a JSON object. Raises ValueError if it is invalid or larger than 64 MiB,
    OSError if it cannot be read.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"{path.name} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must contain a JSON object")
    return cast("dict[str, object]", value)


def _child(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key)
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _integer(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _max_positions(config: Mapping[str, object]) -> int | None:
    for key in _POSITION_KEYS:
        value = _integer(config, key)
        if value is not None and value > 0:
            return value
    return None
