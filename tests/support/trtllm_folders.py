"""Writes model folders of every kind that the TensorRT-LLM executor distinguishes, with the small
files that the vendor's tools write and without weights.
"""

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def hugging_face_folder(path: Path, **config: Any) -> Path:
    """Write a plain model folder; `config` is added to its config.json."""
    write_json(path / "config.json", {**LLAMA, **config})
    write_json(path / "tokenizer.json", {})
    return path


def modelopt_folder(path: Path, algorithm: str | None, kv_cache: str | None = None) -> Path:
    """Write a folder as ModelOpt exports it: a Hugging Face folder with hf_quant_config.json."""
    hugging_face_folder(path)
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": kv_cache, "group_size": 16}
    document = {"producer": {"name": "modelopt"}, "quantization": quantization}
    write_json(path / "hf_quant_config.json", document)
    return path


def checkpoint_config(*, tp_size: int = 1) -> dict[str, Any]:
    return {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
        "quantization": {"quant_algo": "W8A8_SQ_PER_CHANNEL", "kv_cache_quant_algo": "INT8"},
    }


def checkpoint_folder(path: Path) -> Path:
    """Write a checkpoint folder, as the vendor's convert_checkpoint.py does."""
    write_json(path / "config.json", checkpoint_config())
    (path / "rank0.safetensors").touch()
    return path


def engine_folder(path: Path, *, tp_size: int = 1, version: str | None = "1.2.0") -> Path:
    """Write an engine folder for `tp_size` GPUs, as the vendor's builder does."""
    document = {
        "version": version,
        "pretrained_config": checkpoint_config(tp_size=tp_size),
        "build_config": {
            "max_batch_size": 64,
            "max_num_tokens": 2048,
            "max_seq_len": 3000,
            "plugin_config": {"tokens_per_block": 32},
        },
    }
    write_json(path / "config.json", document)
    for rank in range(tp_size):
        (path / f"rank{rank}.engine").touch()
    return path


def adapter_folder(path: Path, *, rank: int = 8, targets: tuple[str, ...] = ("q_proj",)) -> Path:
    """Write the configuration of a LoRA adapter, as PEFT saves it."""
    write_json(path / "adapter_config.json", {"r": rank, "target_modules": list(targets)})
    return path
