"""The archive of a tokenizer has only the tokenizer's files, reproducible bytes, and a size within
the gateway's limit.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from penstock.gateway.smg import worker_info
from penstock.gateway.smg.worker_info import make_bundle
from penstock.server.front.errors import ErrorReason, RequestError
from support.tiny_tokenizers import write_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_model_folder(tmp_path / "tiny")
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "README.md").write_text("secret", encoding="utf-8")
    return made


def test_the_archive_contains_only_the_tokenizer_files(folder: Path) -> None:
    bundle = make_bundle(folder)

    with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
        names = archive.namelist()
        contents = {name: archive.read(name) for name in names}
    assert "tokenizer.json" in names
    assert "config.json" in names
    assert not {"model.safetensors", "README.md"} & set(names)
    assert all(data == (folder / name).read_bytes() for name, data in contents.items())
    assert bundle.sha256 == hashlib.sha256(bundle.data).hexdigest()


def test_the_same_files_make_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted(folder.iterdir(), reverse=True):
        (other / path.name).write_bytes(path.read_bytes())
        (other / path.name).chmod(0o600)
        os.utime(other / path.name, (0, 1_000_000_000))

    assert make_bundle(other).data == make_bundle(folder).data


@pytest.mark.parametrize("bound", ["MAX_FILES", "MAX_BUNDLE_BYTES", "MAX_UNPACKED_BYTES"])
def test_archives_beyond_the_limit_of_the_gateway_are_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(worker_info, bound, 1)

    with pytest.raises(RequestError) as caught:
        make_bundle(folder)

    assert caught.value.reason is ErrorReason.NOT_POSSIBLE_NOW
