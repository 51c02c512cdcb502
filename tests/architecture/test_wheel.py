"""The wheel contains all files that the package needs, also files that are not Python."""

from __future__ import annotations

import pathlib
import tomllib

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("server/penstock/server/observe/metrics/page",)


def test_the_files_of_the_status_page_are_in_the_wheel() -> None:
    builder = WheelBuilder(str(REPOSITORY))
    shipped = {file.distribution_path for file in builder.recurse_included_files()}
    for folder in FOLDERS:
        path = REPOSITORY / folder
        files = {file for file in path.iterdir() if file.is_file()}
        assert files
        root = path.relative_to(REPOSITORY).parts[0]
        for file in files:
            assert file.relative_to(REPOSITORY / root).as_posix() in shipped, file


def test_compiled_kernels_are_in_the_wheel_although_git_ignores_them() -> None:
    kernels = REPOSITORY / "executors/penstock/executor/torch/cpu_kernels/_kernels.so"
    if not kernels.exists():
        pytest.skip("not compiled here")
    builder = WheelBuilder(str(REPOSITORY))
    shipped = {file.distribution_path for file in builder.recurse_included_files()}
    assert "penstock/executor/torch/cpu_kernels/_kernels.so" in shipped


def test_without_extras_only_what_the_client_needs_is_installed() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    names = {Requirement(line).name for line in project["dependencies"]}
    assert names == {
        *("googleapis-common-protos", "grpcio", "grpcio-health-checking", "grpcio-status"),
        "protobuf",
    }
