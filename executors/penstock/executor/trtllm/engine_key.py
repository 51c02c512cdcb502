"""The cache key of an engine, a hash of the model folder's files, the build settings, the GPUs and
the TensorRT-LLM version.

The hash includes, for every file that is not hidden, its relative name and size. For files up to 1
MiB it also includes the content; for larger files the header (safetensors only), 256 samples of 16
KiB spread over the file, and the modification time. Reading all weights would take as long as some
builds; samples and modification time detect weights that a checkpoint tool has rewritten. A copy of
the folder with other modification times has another key, so its engine is built again.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.executor.trtllm.gpus import FoundGpus

_SMALL_BYTES = 1 << 20
_MAX_HEADER_BYTES = 64 << 20
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 16 << 10
_NUM_KEY_CHARS = 20
_FORMAT = 1
"""Incremented when the definition of the hashed data changes, so that engines with older keys are
not reused.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKey:
    """Identifies a built engine.

    `inputs`: everything that determines the engine, as JSON values. `digest`: the first 20
    hexadecimal digits of the SHA-256 of `inputs` as JSON text.
    """

    inputs: Mapping[str, Any]
    digest: str


def engine_key(
    folder: Path, settings: Mapping[str, str], gpus: FoundGpus, version: str
) -> EngineKey:
    """Return the key of an engine. `settings`: the builder's flags and their values. Raises OSError
    naming a file that cannot be read.
    """
    inputs: dict[str, Any] = {
        "format": _FORMAT,
        "files": folder_fingerprint(folder),
        "settings": dict(sorted(settings.items())),
        "gpus": [f"{gpu.name} (compute capability {gpu.compute_capability})" for gpu in gpus.gpus],
        "tensorrt_llm": version,
    }
    return EngineKey(inputs=inputs, digest=_digest(inputs)[:_NUM_KEY_CHARS])


def folder_fingerprint(folder: Path) -> list[dict[str, Any]]:
    """Return relative name, size and content hash of every file that is not hidden, sorted by path.
    The module's docstring defines the content hash of large files.
    """
    return [
        {
            "name": path.relative_to(folder).as_posix(),
            "size_bytes": path.stat().st_size,
            "sha256": _content_hash(path),
        }
        for path in sorted(_files(folder))
    ]


def _files(folder: Path) -> Iterator[Path]:
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield Path(parent, name)


def _content_hash(path: Path) -> str:
    status = path.stat()
    if status.st_size <= _SMALL_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256(str(status.st_mtime_ns).encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            digest.update(file.read(min(_header_bytes(file.read(8)), _MAX_HEADER_BYTES)))
        stride = (status.st_size - _SAMPLE_BYTES) / (_NUM_SAMPLES - 1)
        for index in range(_NUM_SAMPLES):
            file.seek(int(index * stride))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _header_bytes(prefix: bytes) -> int:
    """Return the length in bytes of a safetensors header, given the file's first eight bytes."""
    return int.from_bytes(prefix, "little")


def _digest(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
