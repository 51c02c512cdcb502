"""Which inputs change the name of a cached engine, and how nvidia-smi's output is read."""

import os
import struct
from pathlib import Path

import pytest

from penstock.executor.trtllm.engine_cache import default_cache_folder
from penstock.executor.trtllm.engine_key import engine_key, folder_fingerprint
from penstock.executor.trtllm.gpus import FoundGpus, Gpu, found_gpus

NO_GPUS = FoundGpus(gpus=(), driver="", cuda="")
H100 = FoundGpus(
    gpus=(Gpu(name="NVIDIA H100", memory_mib=81559, compute_capability="9.0"),),
    driver="570.1",
    cuda="12.8",
)
LARGE_BYTES = 8 << 20


def digest(folder: Path, gpus: FoundGpus = NO_GPUS, version: str = "1.2.0", **flags: str) -> str:
    return engine_key(folder, flags, gpus, version).digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    weights = struct.pack("<Q", len(header)) + header
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rank0.safetensors").write_bytes(weights.ljust(LARGE_BYTES, b"\0"))
    return tmp_path


def test_same_inputs_have_the_same_name_in_any_order(folder: Path) -> None:
    one = engine_key(folder, {"a": "1", "b": "2"}, H100, "1.2.0")
    other = engine_key(folder, {"b": "2", "a": "1"}, H100, "1.2.0")

    assert one.digest == other.digest
    assert one.inputs["gpus"] == ["NVIDIA H100 (compute capability 9.0)"]


def test_settings_gpu_and_version_change_the_name(folder: Path) -> None:
    names = {
        digest(folder),
        digest(folder, max_batch_size="8"),
        digest(folder, H100),
        digest(folder, version="1.2.1"),
    }

    assert len(names) == 4


def test_hidden_files_do_not_change_the_name(folder: Path) -> None:
    before = digest(folder)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("x")
    (folder / ".gitattributes").write_text("x")
    assert digest(folder) == before

    (folder / "sub").mkdir()
    (folder / "sub" / "rank1.safetensors").write_bytes(b"")

    assert digest(folder) != before
    assert [file["name"] for file in folder_fingerprint(folder)][-1] == "sub/rank1.safetensors"


@pytest.mark.parametrize("place", [20, LARGE_BYTES - 1])
def test_other_weights_of_the_same_size_and_time_are_noticed(folder: Path, place: int) -> None:
    path = folder / "rank0.safetensors"
    before, status = digest(folder), path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert digest(folder) != before


def test_a_large_file_changed_between_the_samples_is_noticed_by_its_time(folder: Path) -> None:
    path = folder / "rank0.safetensors"
    before, status = digest(folder), path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    assert digest(folder) != before


def test_a_small_file_is_identified_by_its_content_alone(folder: Path) -> None:
    before = digest(folder)
    os.utime(folder / "config.json", ns=(1, 1))

    assert digest(folder) == before


def test_an_invalid_header_length_reads_no_more_than_the_file(folder: Path) -> None:
    path = folder / "rank0.safetensors"
    path.write_bytes(b"\xff" * LARGE_BYTES)

    assert len(digest(folder)) == 20


def test_the_cache_is_where_the_desktop_rules_specify() -> None:
    assert default_cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/penstock/engines")
    # A relative path is to be ignored.
    home = Path.home() / ".cache" / "penstock" / "engines"
    assert default_cache_folder({"XDG_CACHE_HOME": "c"}) == home
    assert default_cache_folder({}) == home


def write_tool(folder: Path, body: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


def test_gpus_are_read_as_nvidia_smi_reports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tool(
        tmp_path,
        'case "$1" in\n'
        '--query*) echo "NVIDIA H100 80GB HBM3, 81559, 9.0, 570.124"\n'
        'echo "X, [N/A], 8.9, 570.124";;\n'
        '*) echo "| NVIDIA-SMI 570.124   Driver Version: 570.124   CUDA Version: 12.8  |";;\nesac',
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    found = found_gpus()

    assert (found.driver, found.cuda) == ("570.124", "12.8")
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H100 80GB HBM3", "X"]
    assert [gpu.memory_mib for gpu in found.gpus] == [81559, None]


@pytest.mark.parametrize("body", ["exit 9", "echo No devices were found"])
def test_a_tool_that_lists_no_gpu_means_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    write_tool(tmp_path, body)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    assert found_gpus() == NO_GPUS


def test_a_missing_tool_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert found_gpus() == NO_GPUS
