"""The benchmarks' C++ programs where there is no compiler."""

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def native_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return importlib.import_module("native_build")


def test_the_load_client_needs_a_compiler(native_build: Any) -> None:
    with pytest.raises(native_build.CannotBuild, match=r"g\+\+ is not installed"):
        native_build.load_client()


def test_the_server_names_what_is_missing(native_build: Any, tmp_path: Path) -> None:
    protoc = tmp_path / "protoc"
    protoc.write_text("#!/bin/sh\n", encoding="ascii")
    protoc.chmod(0o755)
    with pytest.raises(native_build.CannotBuild, match="grpc_cpp_plugin is not installed"):
        native_build.grpc_server()


def test_a_compiler_that_fails_is_quoted(native_build: Any, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n", encoding="ascii")
    compiler.chmod(0o755)
    with pytest.raises(native_build.CannotBuild, match="no such flag"):
        native_build.load_client()
