"""How the installed TensorRT-LLM is examined, when it is rejected, and how the variables of an MPI
job are removed from the environment.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.package import load_package, remove_mpi_variables
from penstock.executor.unavailable import ExecutorUnavailable
from unit.executor.trtllm_recorder import recording_package


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Put a package `tensorrt_llm` on the import path, with `source` as its only file."""
    package = folder / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture(autouse=True)
def fresh_modules() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.mark.usefixtures("fake_trtllm")
def test_features_of_the_installed_version_are_detected() -> None:
    package = load_package()
    vendor: Any = importlib.import_module("tensorrt_llm")

    assert package.version == "1.2.0"
    assert package.build is vendor.LLM
    assert package.sampling_params is vendor.SamplingParams
    assert issubclass(package.request_error, RuntimeError)
    assert {"inputs", "sampling_params", "streaming", "cache_salt"} <= package.generate_arguments
    assert "priority" not in package.generate_arguments
    assert "self" not in package.generate_arguments
    assert {"model", "skip_tokenizer_init", "kv_cache_config"} <= package.llm_arguments
    assert "kwargs" not in package.llm_arguments
    assert not package.honours_penalties
    assert package.named("KvCacheConfig")().tokens_per_block == 32
    assert package.named("LoraConfig")().max_lora_rank == 64


@pytest.mark.usefixtures("fake_trtllm")
def test_penalties_are_found_in_the_default_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler: Any = importlib.import_module("tensorrt_llm._torch.pyexecutor.sampler")
    monkeypatch.setattr(sampler.TorchSampler, "PenaltyHandler", object, raising=False)

    assert load_package().honours_penalties


@pytest.mark.usefixtures("fake_trtllm")
def test_a_version_without_that_module_is_taken_not_to_honour_penalties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importlib.import_module("tensorrt_llm")
    monkeypatch.setitem(sys.modules, "tensorrt_llm._torch.pyexecutor.sampler", None)

    assert not load_package().honours_penalties


@pytest.mark.usefixtures("fake_trtllm")
@pytest.mark.parametrize(
    ("version", "is_warned_of"),
    [
        ("1.2.0", False),
        ("1.2.1", False),
        ("1.2.0rc6.post3", False),
        ("1.20.0", True),
        ("1.1.0", True),
        ("1.3.0rc1", True),
    ],
)
def test_another_release_line_is_used_with_a_warning(
    version: str,
    is_warned_of: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(importlib.import_module("tensorrt_llm"), "__version__", version)

    with caplog.at_level(logging.WARNING, "penstock"):
        assert load_package().version == version

    assert [record.getMessage() for record in caplog.records] == is_warned_of * [
        f"tensorrt_llm is {version}; the trtllm executor was written for release 1.2: run"
        " `penstock verify` before you rely on it"
    ]


@pytest.mark.usefixtures("fake_trtllm")
@pytest.mark.parametrize("chosen", [None, "0"])
def test_usage_is_not_reported_to_the_vendor_unless_the_operator_sets_it(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", chosen or "")
    if chosen is None:
        monkeypatch.delenv("TRTLLM_NO_USAGE_STATS")
    load_package()

    assert os.environ["TRTLLM_NO_USAGE_STATS"] == (chosen or "1")


@pytest.mark.parametrize(
    ("version", "is_later"), [("1.2.1", False), ("1.3.0rc2", True), ("2.0", True), ("what", False)]
)
def test_a_release_after_the_recorded_line_is_reported_with_its_number(
    version: str, is_later: bool
) -> None:
    assert recording_package(version=version).is_later is is_later


def test_without_the_package_extra_and_container_are_named() -> None:
    with pytest.raises(
        ExecutorUnavailable,
        match=r"pip install '\.\[trtllm\]'.*nvidia/tensorrt-llm/release",
    ):
        load_package()


@pytest.mark.parametrize(
    "source",
    [
        "raise ImportError('libnvinfer.so.10: cannot open shared object file')",
        "raise OSError('libnvinfer.so.10: cannot open shared object file')",
        "import libnvinfer_that_is_not_there",
    ],
)
def test_a_package_that_cannot_be_loaded_states_why(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, source)

    with pytest.raises(ExecutorUnavailable, match=r"cannot be loaded: .*libnvinfer.*container"):
        load_package()


@pytest.mark.usefixtures("fake_trtllm")
@pytest.mark.parametrize("name", ["RequestError", "TorchLlmArgs", "KvCacheRetentionConfig"])
def test_a_version_that_lacks_a_name_is_rejected_naming_both(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module("tensorrt_llm.llmapi"), name)

    with pytest.raises(ExecutorUnavailable, match=rf"tensorrt_llm 1\.2\.0 has no {name};"):
        load_package()


@pytest.mark.usefixtures("fake_trtllm")
def test_a_class_that_is_nowhere_is_rejected_by_name() -> None:
    with pytest.raises(ExecutorUnavailable, match=r"tensorrt_llm 1\.2\.0 has no FluxConfig"):
        load_package().named("FluxConfig")


@pytest.mark.usefixtures("fake_trtllm")
def test_an_engine_built_ahead_runs_on_its_own_backend() -> None:
    package = load_package(is_engine=True)

    assert package.build is importlib.import_module("tensorrt_llm._tensorrt_engine").LLM
    assert {"model", "fast_build"} <= package.llm_arguments
    assert "fast_build" not in load_package().llm_arguments
    assert "sampling_params" in package.generate_arguments


@pytest.mark.usefixtures("fake_trtllm")
def test_an_engine_built_ahead_needs_the_backend_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("tensorrt_llm")
    monkeypatch.setitem(sys.modules, "tensorrt_llm._tensorrt_engine", None)

    with pytest.raises(ExecutorUnavailable, match="has no backend for engines built ahead"):
        load_package(is_engine=True)


def test_variables_of_an_mpi_job_are_removed_and_tuning_variables_are_kept() -> None:
    job = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_MCA_ess": "^singleton",
        "OMPI_MCA_orte_ess_jobid": "1",
        "OMPI_MCA_pmix": "^s1",
        "PMIX_RANK": "0",
        "PMIX_SERVER_URI4": "tcp",
        "PMI_RANK": "0",
        "PRTE_LAUNCHED": "1",
    }
    kept = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "OMPI_MCA_coll_hcoll_enable": "0",
        "PMIX_MCA_gds": "hash",
        "PATH": "/bin",
        "COMPILER": "gcc",
    }
    environment = {**job, **kept}

    remove_mpi_variables(environment)

    assert environment == kept


@pytest.mark.usefixtures("fake_trtllm")
def test_variables_of_an_mpi_job_are_removed_before_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMIX_RANK", "0")
    seen: list[str | None] = []
    import_module = importlib.import_module

    def importing(name: str) -> types.ModuleType:
        seen.append(os.environ.get("PMIX_RANK"))
        return import_module(name)

    monkeypatch.setattr("penstock.executor.trtllm.package.import_module", importing)

    load_package()

    assert seen
    assert set(seen) == {None}


def test_importing_the_adapter_does_not_import_the_package() -> None:
    program = (
        "import sys, penstock.executor.trtllm.package, penstock.executor.trtllm.llm_args\n"
        "assert not {'torch', 'tensorrt_llm'} & set(sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()
