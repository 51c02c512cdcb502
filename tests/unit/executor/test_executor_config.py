"""The ranges and the JSON form of the executor's settings, how model folders are found, and which
executor is created.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.executor import create as create_module
from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.create import create_executor
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.models import ModelNotFound, resolve_model
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.trtllm.config import (
    AdapterConfig,
    CudaGraphSettings,
    DecodingType,
    GuidedDecodingBackend,
    LoraSettings,
    SamplerOption,
    SpeculativeSettings,
    TrtllmConfig,
)
from penstock.executor.unavailable import ExecutorUnavailable
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.setting import SettingError
from penstock.server.settings.json_values import from_json_value, to_json_value

FULL = ExecutorConfig(
    kind=ExecutorKind.SIMULATED,
    model_path=Path("/models/some"),
    tokenizer_path=Path("/models/words"),
    device="cuda:1",
    dtype="bfloat16",
    kv_cache_dtype="auto",
    block_size=8,
    num_blocks=100,
    kv_cache_bytes=1 << 20,
    kv_memory_fraction=0.5,
    max_num_seqs=3,
    max_num_batched_tokens=64,
    max_seq_len=512,
    num_threads=2,
    pipeline_depth=2,
    simulated=SimulatedConfig(
        vocab_size=99,
        cost=CostModel(step_s=0.5),
        is_real_time=True,
        min_output_tokens=2,
        max_output_tokens=7,
        is_strict=True,
        faults=(Fault(kind=FaultKind.HANG, at_step=3), Fault(kind=FaultKind.SLOW_STEP, at_step=1)),
    ),
    trtllm=TrtllmConfig(
        sampler_honours=(SamplerOption.SEED,),
        guided_decoding_backend=GuidedDecodingBackend.XGRAMMAR,
        cuda_graph_config=CudaGraphSettings(batch_sizes=(1, 8)),
        lora_config=LoraSettings(adapters=(AdapterConfig(name="a", path=Path("/a"), id=1),)),
        speculative_config=SpeculativeSettings(
            decoding_type=DecodingType.EAGLE, max_draft_len=3, speculative_model=Path("/d")
        ),
    ),
)


def test_json_round_trip_keeps_every_field() -> None:
    text = json.dumps(to_json_value(FULL))

    assert from_json_value(ExecutorConfig, json.loads(text)) == FULL


def test_missing_fields_have_their_defaults() -> None:
    config = from_json_value(ExecutorConfig, {"kind": "simulated"})

    assert config == ExecutorConfig(kind=ExecutorKind.SIMULATED)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "abacus"}, "ExecutorConfig.kind must be one of 'torch', 'simulated'"),
        ({"kind": "simulated", "sort": 1}, "ExecutorConfig.sort is unknown"),
        (
            {"kind": "simulated", "block_size": "16"},
            "block_size must be an integer at least 1, not '16'",
        ),
        (
            {"kind": "simulated", "block_size": True},
            "block_size must be an integer at least 1, not true",
        ),
        ({"kind": "simulated", "simulated": {"faults": [{}]}}, r"faults\[0\].kind is missing"),
        (
            {"kind": "simulated", "simulated": {"faults": {}}},
            "faults must be an array, not an object",
        ),
        (
            {"kind": "simulated", "num_blocks": 1.5},
            "num_blocks must be an integer at least 1, not 1.5",
        ),
        ({"kind": "simulated", "device": None}, "device must be a string, not null"),
        ({"kind": ["torch"]}, "kind must be one of 'torch', .*, not an array"),
        ({"kind": "x" * 999}, "kind must be one of .*, not '" + "x" * 79 + r"\.\.\.$"),
        (
            {"kind": "simulated", "simulated": {"cost": {"step_s": 10**400}}},
            "simulated.cost.step_s must be in 0..3600",
        ),
        (
            {"kind": "simulated", "simulated": {"cost": {"step_s": "1"}}},
            "simulated.cost.step_s must be a number in 0..3600, not '1'",
        ),
        ({"kind": "simulated", "simulated": {"cost": 3}}, "cost must be an object, not 3"),
        (
            {"kind": "simulated", "simulated": {"cost": {"step_s": -1}}},
            "simulated.cost.step_s must be in 0..3600",
        ),
    ],
)
def test_bad_json_names_the_field(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json_value(ExecutorConfig, data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"),
        ("device", "cuda:"),
        ("dtype", "int3"),
        ("quantization", "fp4"),
        ("quantization", "fp8"),  # of the simulated executor
        ("kv_cache_dtype", "int3"),
        ("kv_cache_dtype", "int8"),  # of the simulated executor
        ("block_size", 0),
        ("num_blocks", 0),
        ("kv_cache_bytes", 0),
        ("kv_memory_fraction", 0.0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_seq_len", 1),
        ("num_threads", 0),
        ("pipeline_depth", 3),
    ],
)
def test_executor_config_rejects_by_field(field: str, value: object) -> None:
    values: dict[str, Any] = {"kind": ExecutorKind.SIMULATED, field: value}

    with pytest.raises(ValueError, match=f"^{field} must be"):
        ExecutorConfig(**values)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quantization", "fp8", "quantization fp8 requires a GPU"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype fp8 requires a GPU"),
        ("pipeline_depth", 2, "pipeline_depth must be 1 for the torch executor on a CPU, not 2"),
    ],
)
def test_settings_that_no_cpu_supports_are_rejected_before_a_model_is_read(
    field: str, value: object, message: str
) -> None:
    values: dict[str, Any] = {"model_path": Path("/m"), field: value}

    with pytest.raises(SettingError, match=f"^{message}"):
        ExecutorConfig(**values)
    assert getattr(ExecutorConfig(device="cuda:1", **values), field) == value


@pytest.mark.parametrize("kind", [ExecutorKind.TORCH, ExecutorKind.TRTLLM])
def test_real_executors_need_a_model(kind: ExecutorKind) -> None:
    with pytest.raises(ValueError, match=f"^model_path must be given for the {kind} executor"):
        ExecutorConfig(kind=kind)


SLOW = {"kind": FaultKind.SLOW_STEP}


@pytest.mark.parametrize(
    ("owner", "values", "message"),
    [
        (SimulatedConfig, {"vocab_size": 1}, "vocab_size must be"),
        (SimulatedConfig, {"kv_bytes_per_token": 0}, "kv_bytes_per_token must be"),
        (SimulatedConfig, {"min_output_tokens": 0}, "min_output_tokens must be"),
        (
            SimulatedConfig,
            {"min_output_tokens": 5, "max_output_tokens": 4},
            "max_output_tokens must be",
        ),
        (Fault, SLOW, "at_step, at_request, at_prompt_token or at_output must be given"),
        (Fault, {**SLOW, "at_step": 0}, "at_step must be at least 1"),
        (Fault, {**SLOW, "at_request": 0}, "at_request must be at least 1"),
        (Fault, {**SLOW, "at_prompt_token": -1}, "at_prompt_token must be at least 0"),
        (Fault, {**SLOW, "at_output": -1}, "at_output must be at least 0"),
        (Fault, {**SLOW, "at_step": 1, "max_times": 0}, "max_times must be at least 1"),
        (Fault, {**SLOW, "at_step": 1, "seconds": -1.0}, "seconds must be at least 0"),
        (Fault, {**SLOW, "at_step": 1, "num_extra": 0}, "num_extra must be at least 1"),
        (Fault, {**SLOW, "at_step": 1, "exit_code": 256}, "exit_code must be in"),
    ],
)
def test_invalid_simulated_settings_are_rejected_by_field(
    owner: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        owner(**values)


def test_create_executor_builds_the_simulated_one() -> None:
    executor = create_executor(ExecutorConfig(kind=ExecutorKind.SIMULATED))

    assert isinstance(executor, SimulatedExecutor)


def test_create_executor_names_the_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> object:
        return None if name == "transformers" else importlib.util.find_spec(name)

    monkeypatch.setattr(create_module, "find_spec", find)

    with pytest.raises(ExecutorUnavailable, match=r"\(transformers is not .*'\.\[torch\]'"):
        create_executor(ExecutorConfig(kind=ExecutorKind.TORCH, model_path=tmp_path))


def test_create_executor_names_extra_and_container_of_tensorrt_llm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create_module, "find_spec", lambda _: None)

    with pytest.raises(ExecutorUnavailable, match=r"'\.\[trtllm\]'.*tensorrt-llm/release"):
        create_executor(ExecutorConfig(kind=ExecutorKind.TRTLLM, model_path=tmp_path))


def test_settings_and_simulated_executor_load_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\n"
        "import penstock.executor.models\n"
        "from penstock.executor.config import ExecutorConfig, ExecutorKind\n"
        "from penstock.executor.create import create_executor\n"
        "create_executor(ExecutorConfig(kind=ExecutorKind.SIMULATED))\n"
        "assert not {'torch', 'transformers', 'tensorrt_llm'} & set(sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()


def test_resolve_model_finds_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_resolve_model_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    assert resolve_model("mine") == (tmp_path / "mine").resolve()


@pytest.mark.parametrize("name", ["", "no/such/folder"])
def test_resolve_model_reports_what_is_missing(name: str) -> None:
    with pytest.raises(ModelNotFound, match="not found") as caught:
        resolve_model(name)

    assert caught.value.name_or_path == name


def test_resolve_model_requires_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"contains no config\.json"):
        resolve_model(str(tmp_path))
