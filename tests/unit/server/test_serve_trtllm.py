"""Where `penstock serve --executor trtllm` takes its settings from, and which ones are derived."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.trtllm.config import (
    AdapterConfig,
    CapacityPolicy,
    KvCacheSettings,
    LoraSettings,
    SchedulerSettings,
    TrtllmConfig,
    WatchSettings,
)
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.server.config import (
    SETTINGS,
    ServerConfig,
)
from penstock.server.processes.spawn_context import engine_environment
from penstock.server.settings.sources import BadSetting
from support.serve_config import check_launches, serve_config
from support.trtllm_folders import (
    adapter_folder,
    checkpoint_folder,
    engine_folder,
    hugging_face_folder,
)


@pytest.fixture(autouse=True)
def no_gpus_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return hugging_face_folder(tmp_path / "model")


def configured(model: Path, *arguments: str, **environment: str) -> ServerConfig:
    return serve_config("--executor", "trtllm", "--model", model, *arguments, **environment)


def section(**values: Any) -> tuple[str, str]:
    return "--trtllm-config", json.dumps(values)


def test_without_a_section_the_defaults_apply(model: Path) -> None:
    config = configured(model)

    assert config.executor == ExecutorConfig(
        kind=ExecutorKind.TRTLLM, model_path=model, max_num_seqs=256
    )
    assert config.executor.trtllm == TrtllmConfig()
    assert config.scheduler == SchedulerConfig(
        max_num_batched_tokens=8192, admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT
    )
    assert config.front.is_prefix_caching


def test_the_service_takes_its_limits_from_the_section(model: Path) -> None:
    config = configured(
        model,
        *section(
            max_batch_size=32,
            max_num_tokens=1024,
            max_seq_len=2000,
            scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
            kv_cache_config={"enable_block_reuse": False},
        ),
        *("--max-num-waiting", "9", "--watermark", "0.5"),
    )

    assert (config.executor.max_num_seqs, config.executor.max_seq_len) == (32, 2000)
    assert config.scheduler == SchedulerConfig(
        max_num_batched_tokens=1024,
        admission_policy=AdmissionPolicy.MAX_UTILIZATION,
        max_num_waiting=9,
        watermark=0.5,
    )
    assert not config.front.is_prefix_caching


def test_policies_have_the_names_that_the_engine_knows() -> None:
    assert {policy.name for policy in CapacityPolicy} == {item.name for item in AdmissionPolicy}


def test_the_section_comes_from_a_json_file_a_toml_file_or_the_environment(
    model: Path, tmp_path: Path
) -> None:
    adapter = adapter_folder(tmp_path / "poet")
    wanted = TrtllmConfig(
        max_batch_size=8,
        kv_cache_config=KvCacheSettings(free_gpu_memory_fraction=0.5),
        scheduler_config=SchedulerSettings(
            capacity_scheduler_policy=CapacityPolicy.MAX_UTILIZATION
        ),
        lora_config=LoraSettings(adapters=(AdapterConfig(name="poet", path=adapter, id=3),)),
        watch=WatchSettings(abort_timeout_s=1.0),
    )
    values = {
        "max_batch_size": 8,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "lora_config": {"adapters": [{"name": "poet", "path": str(adapter), "id": 3}]},
        "watch": {"abort_timeout_s": 1},
    }
    as_json, as_toml = tmp_path / "engine.json", tmp_path / "engine.toml"
    as_json.write_text(json.dumps(values))
    as_toml.write_text(
        "max_batch_size = 8\n"
        "kv_cache_config.free_gpu_memory_fraction = 0.5\n"
        'scheduler_config.capacity_scheduler_policy = "MAX_UTILIZATION"\n'
        f'[[lora_config.adapters]]\nname = "poet"\npath = "{adapter}"\nid = 3\n'
        "[watch]\nabort_timeout_s = 1\n"
    )

    for config in (
        configured(model, "--trtllm-config", " " + json.dumps(values)),
        configured(model, "--trtllm-config", str(as_json)),
        configured(model, "--trtllm-config", str(as_toml)),
        configured(model, PENSTOCK_TRTLLM_CONFIG=str(as_toml)),
    ):
        assert config.executor.trtllm == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "trtllm-config is not valid JSON"),
        ('{"a": ' + "[" * 99_999, "trtllm-config is not valid JSON: it is nested too deep"),
        (
            '{"max_batch_size": ' + "[" * 400 + "]" * 400 + "}",
            "must be an integer in 1..65536, not an array",
        ),
        (
            '{"max_batch_size": ' + "9" * 5000 + "}",
            "trtllm-config is not valid JSON: Exceeds the limit",
        ),
        (
            '{"watch": {"abort_timeout_s": 1, "abort_timeout_s": 2}}',
            "trtllm-config is not valid JSON: duplicate key 'abort_timeout_s'",
        ),
        ("nowhere.json", "trtllm-config: nowhere.json cannot be read: No such file"),
        ('{"max_batch": 3}', "--trtllm-config.max_batch is unknown; did you mean max_batch_size?"),
        (
            '{"max_batch_size": "8"}',
            "trtllm-config.max_batch_size must be an integer in 1..65536, not '8'",
        ),
        ('{"kv_cache_config": {"size": 3}}', "trtllm-config.kv_cache_config.size is unknown"),
        (
            '{"kv_cache_config": {"tokens_per_block": 24}}',
            "trtllm-config.kv_cache_config.tokens_per_block must be a power of 2, not 24",
        ),
        (
            '{"lora_config": {"adapters": [{"name": "a", "path": "/a"}]}}',
            "trtllm-config.lora_config.adapters[0].id is missing",
        ),
    ],
)
def test_an_invalid_value_in_the_section_is_named_by_its_path(
    model: Path, text: str, message: str
) -> None:
    with pytest.raises(BadSetting, match=re.escape(message)):
        configured(model, "--trtllm-config", text)


@pytest.mark.parametrize(("suffix", "kind"), [("json", "JSON"), ("toml", "TOML")])
def test_a_broken_file_is_named(model: Path, tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"engine.{suffix}"
    for content in (b"= {", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(BadSetting, match=f"trtllm-config: {path} is not valid {kind}"):
            configured(model, "--trtllm-config", str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[" * 99_999, "a.json is not valid JSON: it is nested too deep"),
        ("a.json", '{"dtype": "auto", "dtype": "auto"}', "duplicate key 'dtype'"),
        ("a.toml", "a = " + "[" * 99_999, "a.toml is nested too deep"),
        ("a.toml", "dtype = 'auto'\ndtype = 'auto'", "a.toml is not valid TOML: "),
    ],
)
def test_deeply_nested_files_and_duplicate_keys_are_rejected(
    model: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(BadSetting, match=re.escape(message)):
        configured(model, "--trtllm-config", str(path))


def test_a_model_nested_too_deep_is_rejected_in_one_line(model: Path) -> None:
    (model / "config.json").write_text('{"a": ' + "[" * 99_999)
    with pytest.raises(BadSetting, match=r"cannot be read: config.json is nested too deep$"):
        configured(model)


def test_a_file_must_contain_an_object(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text("[]")
    with pytest.raises(BadSetting, match=r"trtllm-config must be an object, not an array"):
        configured(model, "--trtllm-config", str(path))


REPLACED = {
    "max-num-seqs": ("5", "max_batch_size"),
    "max-num-batched-tokens": ("99", "max_num_tokens"),
    "max-seq-len": ("77", "max_seq_len"),
    "admission-policy": ("max_utilization", "scheduler_config.capacity_scheduler_policy"),
    "block-size": ("8", "kv_cache_config.tokens_per_block"),
    "num-blocks": ("8", "kv_cache_config.max_tokens"),
    "kv-cache-mib": ("8", "kv_cache_config.free_gpu_memory_fraction"),
    "kv-memory-fraction": ("0.5", "kv_cache_config.free_gpu_memory_fraction"),
    "dtype": ("bfloat16", "dtype"),
    "pipeline-depth": ("1", "disable_overlap_scheduler"),
    "kv-cache-dtype": ("fp8", "kv_cache_config.dtype"),
}


@pytest.mark.parametrize("flag", REPLACED)
def test_a_flag_replaced_by_a_key_of_the_section_is_rejected_with_that_key(
    model: Path, flag: str
) -> None:
    value, key = REPLACED[flag]
    message = f"is set for the trtllm executor by {re.escape(key)} in --trtllm-config$"

    with pytest.raises(BadSetting, match=f"^--{flag} {message}"):
        configured(model, f"--{flag}", value)
    variable = f"PENSTOCK_{flag.upper().replace('-', '_')}"
    with pytest.raises(BadSetting, match=f"^{variable} {message}"):
        configured(model, **{variable: value})


MEANINGLESS = {
    "device": "cuda:1",
    "threads": "2",
    "cpu-kernels": "avx2",
    "quantization": "int8",
    "target-itl-ms": "50",
    "max-prefill-share": "0.5",
    "deadline-admission": "on",
    "min-deadline-chance": "0.2",
    "step-cost": '{"step_s": 1, "prefill_token_s": 0, "decode_slot_s": 0, "context_token_s": 0}',
    "eviction": "lru",
    "max-session-share": "0.5",
    "max-tenant-session-share": "0.25",
    "max-session-tokens": "64",
}


@pytest.mark.parametrize(("flag", "value"), list(MEANINGLESS.items()))
def test_a_flag_without_effect_is_rejected(model: Path, flag: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"^--{flag} has no effect with the trtllm executor: "):
        configured(model, f"--{flag}", value)


def test_every_setting_of_executors_is_rejected_or_has_a_meaning(model: Path) -> None:
    groups = ("executor", "batching", "cache")
    names = {option.flag for option in SETTINGS if option.setting.group in groups}
    has_meaning = {
        *("watermark", "prefix-caching", "session-ttl-s", "session-retention-level"),
        *("share-prefixes-across-tenants", "max-retention-share", "max-tenant-retention-share"),
        *("max-retention-s", "trtllm-config"),
    }
    deadlines = {"deadline-admission", "min-deadline-chance"}

    assert names - has_meaning == {*REPLACED, *MEANINGLESS, "simulated-config"} - deadlines
    with pytest.raises(BadSetting, match="simulated-config has no effect with the trtllm executor"):
        configured(model, "--simulated-config", "{}")


def test_trtllm_config_is_rejected_with_other_executors() -> None:
    with pytest.raises(BadSetting, match="trtllm-config has no effect with the simulated executor"):
        serve_config("--executor", "simulated", "--trtllm-config", "{}")


@pytest.mark.parametrize(("caching", "reuse"), [("on", False), ("off", True)])
def test_prefix_caching_and_block_reuse_must_agree(model: Path, caching: str, reuse: bool) -> None:
    agreeing = section(kv_cache_config={"enable_block_reuse": not reuse})
    config = configured(model, "--prefix-caching", caching, *agreeing)
    assert config.front.is_prefix_caching is (caching == "on")

    with pytest.raises(BadSetting, match=f"prefix-caching is {caching} and .* they must agree"):
        configured(
            model,
            *("--prefix-caching", caching),
            *section(kv_cache_config={"enable_block_reuse": reuse}),
        )


def test_the_model_is_checked_before_any_process_starts(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadSetting, match="penstock build"):
        configured(checkpoint_folder(tmp_path / "checkpoint"))
    adapters = [{"name": "a", "path": str(tmp_path / "none"), "id": 1}]
    with pytest.raises(BadSetting, match=r"lora_config.adapters\[0\].path"):
        configured(model, *section(lora_config={"adapters": adapters}))
    caplog.clear()

    with caplog.at_level(logging.INFO, "penstock"):
        configured(model, *section(max_seq_len=9999))

    levels = {record.levelname: record.getMessage() for record in caplog.records}
    assert "is a Hugging Face model" in levels["INFO"]
    assert "max_seq_len is 9999, beyond the 4096" in levels["WARNING"]


def test_more_gpus_than_the_environment_makes_visible_are_rejected(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(BadSetting, match="CUDA_VISIBLE_DEVICES shows 1"):
        configured(model, *section(tensor_parallel_size=2))


def test_an_engine_is_served_with_the_tokenizer_of_its_model(model: Path, tmp_path: Path) -> None:
    engine = engine_folder(tmp_path / "engine")
    sizes = section(max_batch_size=8, max_num_tokens=512)

    with pytest.raises(BadSetting, match="tokenizer must be given"):
        configured(engine, *sizes)
    config = configured(engine, *sizes, "--tokenizer", str(model))

    assert (config.model_path, config.tokenizer_path) == (engine, model)
    assert (config.executor.model_path, config.executor.tokenizer_path) == (engine, model)


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_tokenizer_folder_without_its_files_is_rejected_for_every_executor(
    model: Path, missing: str
) -> None:
    (model / missing).unlink()
    with pytest.raises(BadSetting, match=f"^--tokenizer: .* contains no {re.escape(missing)}"):
        serve_config("--executor", "simulated", "--tokenizer", model)


def test_the_section_is_passed_to_child_processes_unchanged(model: Path, tmp_path: Path) -> None:
    draft = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": str(model)}
    adapters = [{"name": "a", "path": str(adapter_folder(tmp_path / "a")), "id": 1}]
    config = configured(
        model,
        *section(
            speculative_config=draft,
            lora_config={"adapters": adapters},
            cuda_graph_config={"batch_sizes": [1, 2]},
            sampler_honours=["seed"],
        ),
        *("--tokenizer", str(model)),
    )

    check_launches(config)


def test_the_engine_downloads_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    environment = engine_environment(configured(model).executor, num_cores=8, num_fronts=4)

    assert environment["HF_HUB_OFFLINE"] == "1"
    assert not {name for name in environment if name.startswith("OMP_")}
