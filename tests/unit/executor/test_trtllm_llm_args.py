"""How settings become arguments of TensorRT-LLM's `LLM`: their names and classes, and which
settings are rejected.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.config import TrtllmConfig
from penstock.executor.trtllm.llm_args import llm_arguments
from penstock.executor.trtllm.model_kind import recognise
from penstock.executor.trtllm.package import Package, load_package
from penstock.executor.unavailable import ExecutorUnavailable
from penstock.server.settings.json_values import from_json_value
from support.trtllm_folders import adapter_folder, engine_folder, hugging_face_folder

pytestmark = pytest.mark.usefixtures("fake_trtllm")
EAGLE: dict[str, Any] = {
    "decoding_type": "Eagle",
    "max_draft_len": 3,
    "speculative_model": "/draft",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return hugging_face_folder(tmp_path / "model")


def arguments(
    model: Path, package: Package | None = None, tokenizer: Path | None = None, **values: Any
) -> dict[str, Any]:
    config = from_json_value(TrtllmConfig, values)
    folder = recognise(model)
    return llm_arguments(config, folder, package or load_package(), tokenizer_path=tokenizer)


def without(package: Package, *names: str) -> Package:
    return dataclasses.replace(package, llm_arguments=package.llm_arguments - set(names))


def with_classes(package: Package, **classes: Any) -> Package:
    """Return `package` with all its classes in one module. `classes` replaces classes by name; None
    removes a class.
    """
    module = types.ModuleType("tensorrt_llm.llmapi")
    for found in reversed(package.modules):
        vars(module).update({name: value for name, value in vars(found).items() if name[0] != "_"})
    vars(module).update(classes)
    return dataclasses.replace(package, modules=(module,))


def lora(*paths: Path, **values: Any) -> dict[str, Any]:
    adapters = [
        {"name": path.name, "path": str(path), "id": number}
        for number, path in enumerate(paths, start=1)
    ]
    return {"adapters": adapters, **values}


def test_the_default_arguments_are_accepted_by_the_vendor(model: Path) -> None:
    made = arguments(model)
    vendor_args: Any = importlib.import_module("tensorrt_llm.llmapi").TorchLlmArgs(**made)

    assert made["model"] == str(model)
    assert (made["max_batch_size"], made["max_num_tokens"]) == (256, 8192)
    assert made["enable_chunked_prefill"] is True
    assert vendor_args.kv_cache_config.free_gpu_memory_fraction == 0.9
    assert vendor_args.kv_cache_config.enable_block_reuse
    assert vendor_args.scheduler_config.capacity_scheduler_policy.name == "GUARANTEED_NO_EVICT"
    assert vendor_args.cuda_graph_config is not None


def test_arguments_that_do_not_depend_on_settings(model: Path) -> None:
    made = arguments(model)

    assert made["skip_tokenizer_init"] is True
    assert made["enable_iter_perf_stats"] is True
    for left_alone in (
        *("backend", "otlp_traces_endpoint", "stream_interval", "tokenizer", "max_beam_width"),
        *("max_seq_len", "guided_decoding_backend", "lora_config", "speculative_config"),
    ):
        assert left_alone not in made


def test_plain_settings_are_passed_under_their_names(model: Path) -> None:
    made = arguments(
        model,
        max_seq_len=2048,
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        dtype="bfloat16",
        trust_remote_code=True,
        disable_overlap_scheduler=True,
        attn_backend="FLASHINFER",
        sampler_type="TRTLLMSampler",
    )

    assert (made["max_seq_len"], made["dtype"]) == (2048, "bfloat16")
    assert (made["tensor_parallel_size"], made["pipeline_parallel_size"]) == (2, 4)
    assert made["trust_remote_code"] is made["disable_overlap_scheduler"] is True
    assert made["attn_backend"] == "FLASHINFER"
    assert type(made["sampler_type"]) is str
    assert made["sampler_type"] == "TRTLLMSampler"


def test_guided_decoding_needs_the_tokenizer(model: Path, tmp_path: Path) -> None:
    made = arguments(model, guided_decoding_backend="xgrammar")
    elsewhere = arguments(model, tokenizer=tmp_path, guided_decoding_backend="xgrammar")

    assert made["guided_decoding_backend"] == "xgrammar"
    assert (made["tokenizer"], elsewhere["tokenizer"]) == (str(model), str(tmp_path))
    assert "skip_tokenizer_init" not in made


def test_the_cache_and_the_scheduler_are_built_with_the_vendors_classes(model: Path) -> None:
    cache = {
        "free_gpu_memory_fraction": 0.5,
        "max_tokens": 640,
        "tokens_per_block": 64,
        "enable_block_reuse": False,
        "enable_partial_reuse": False,
        "host_cache_size": 1 << 30,
        "dtype": "fp8",
    }
    policies = {
        "capacity_scheduler_policy": "MAX_UTILIZATION",
        "context_chunking_policy": "EQUAL_PROGRESS",
    }

    made = arguments(model, kv_cache_config=cache, scheduler_config=policies)

    assert {name: getattr(made["kv_cache_config"], name) for name in cache} == cache
    llmapi: Any = importlib.import_module("tensorrt_llm.llmapi")
    assert isinstance(made["kv_cache_config"], llmapi.KvCacheConfig)
    scheduler = made["scheduler_config"]
    assert scheduler.capacity_scheduler_policy is llmapi.CapacitySchedulerPolicy.MAX_UTILIZATION
    assert scheduler.context_chunking_policy is llmapi.ContextChunkingPolicy.EQUAL_PROGRESS


@pytest.mark.parametrize(("has_priority", "policy"), [(True, "priority"), (False, "fcfs")])
def test_the_engine_orders_by_priority_if_its_version_supports_that(
    model: Path, monkeypatch: pytest.MonkeyPatch, has_priority: bool, policy: str
) -> None:
    llmapi: Any = importlib.import_module("tensorrt_llm.llmapi")

    @dataclass(kw_only=True)
    class Later(llmapi.SchedulerConfig):  # type: ignore[misc]  # the stand-in's, by name
        waiting_queue_policy: str = "fcfs"
        model_fields = None  # its fields are its parameters

    monkeypatch.setattr(llmapi, "SchedulerConfig", Later)
    package = load_package()
    if has_priority:
        taken = package.generate_arguments | {"priority"}
        package = replace(package, generate_arguments=taken)

    assert arguments(model, package)["scheduler_config"].waiting_queue_policy == policy


def test_cuda_graphs_are_disabled_sized_or_left_to_the_engine(model: Path) -> None:
    off = arguments(model, cuda_graph_config={"enabled": False})
    sized = arguments(model, cuda_graph_config={"batch_sizes": [1, 8], "enable_padding": True})

    assert off["cuda_graph_config"] is None
    assert sized["cuda_graph_config"].batch_sizes == [1, 8]
    assert sized["cuda_graph_config"].enable_padding
    assert arguments(model)["cuda_graph_config"].batch_sizes is None


def test_adapters_make_room_for_all_of_them(model: Path, tmp_path: Path) -> None:
    first, second = adapter_folder(tmp_path / "a"), adapter_folder(tmp_path / "b")

    made = arguments(model, lora_config=lora(first, second))["lora_config"]

    assert (made.max_loras, made.max_cpu_loras, made.max_lora_rank) == (2, 2, 64)
    assert made.lora_dir == [str(first)]
    assert made.lora_target_modules == []


def test_layers_of_adapters_may_be_named_instead(model: Path, tmp_path: Path) -> None:
    settings = lora(
        adapter_folder(tmp_path / "a"), lora_target_modules=["attn_q"], max_loras=1, max_cpu_loras=3
    )

    made = arguments(model, lora_config=settings)["lora_config"]

    assert (made.lora_dir, made.lora_target_modules) == ([], ["attn_q"])
    assert (made.max_loras, made.max_cpu_loras) == (1, 3)


@pytest.mark.parametrize(
    ("settings", "class_name", "fields"),
    [
        (
            {"decoding_type": "NGram", "max_draft_len": 4},
            "NGramDecodingConfig",
            {"max_draft_len": 4, "max_matching_ngram_size": 2},
        ),
        (
            {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 3},
            "NGramDecodingConfig",
            {"max_matching_ngram_size": 3},
        ),
        (
            EAGLE,
            "EagleDecodingConfig",
            {"max_draft_len": 3, "speculative_model_dir": "/draft", "eagle3_one_model": True},
        ),
        ({**EAGLE, "eagle3_one_model": False}, "EagleDecodingConfig", {"eagle3_one_model": False}),
        (
            {"decoding_type": "MTP", "num_nextn_predict_layers": 2},
            "MTPDecodingConfig",
            {"num_nextn_predict_layers": 2},
        ),
        ({"decoding_type": "MTP"}, "MTPDecodingConfig", {"num_nextn_predict_layers": 1}),
        (
            {**EAGLE, "decoding_type": "DraftTarget"},
            "DraftTargetDecodingConfig",
            {"max_draft_len": 3, "speculative_model_dir": "/draft"},
        ),
        ({"decoding_type": "AUTO"}, "AutoDecodingConfig", {}),
    ],
)
def test_speculation_is_built_with_the_class_of_its_kind(
    model: Path, settings: Mapping[str, Any], class_name: str, fields: Mapping[str, Any]
) -> None:
    made = arguments(model, speculative_config=settings)["speculative_config"]

    assert type(made).__name__ == class_name
    assert {name: getattr(made, name) for name in fields} == fields


def test_later_versions_have_another_argument_for_the_draft_model(model: Path) -> None:
    class EagleDecodingConfig:
        def __init__(
            self, *, max_draft_len: int, speculative_model: str, eagle3_one_model: bool = True
        ) -> None:
            self.speculative_model = speculative_model

    package = with_classes(load_package(), EagleDecodingConfig=EagleDecodingConfig)

    made = arguments(model, package, speculative_config=EAGLE)

    assert made["speculative_config"].speculative_model == "/draft"


def test_missing_arguments_of_a_version_are_omitted_if_not_set(model: Path) -> None:
    package = without(load_package(), "sampler_type", "attn_backend", "cuda_graph_config")

    made = arguments(model, package)

    assert not {"sampler_type", "attn_backend", "cuda_graph_config"} & set(made)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampler_type", "TorchSampler"),
        ("attn_backend", "FLASHINFER"),
        ("max_seq_len", 100),
        ("cuda_graph_config", {"enabled": False}),
        ("speculative_config", EAGLE),
    ],
)
def test_missing_arguments_of_a_version_are_rejected_if_set(
    model: Path, name: str, value: Any
) -> None:
    package = without(load_package(), name)

    with pytest.raises(ValueError, match=rf"^{name} cannot be set: tensorrt_llm 1\.2\.0 does not"):
        arguments(model, package, **{name: value})


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens", "enable_iter_perf_stats"])
def test_missing_required_arguments_are_rejected_even_at_their_default(
    model: Path, name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} cannot be set"):
        arguments(model, without(load_package(), name))


def test_a_field_that_a_class_lacks_is_rejected_only_if_asked_for(model: Path) -> None:
    class KvCacheConfig:
        def __init__(
            self,
            *,
            free_gpu_memory_fraction: float,
            enable_block_reuse: bool,
            enable_partial_reuse: bool,
            dtype: str,
        ) -> None:
            pass

    package = with_classes(load_package(), KvCacheConfig=KvCacheConfig)

    assert isinstance(arguments(model, package)["kv_cache_config"], KvCacheConfig)
    with pytest.raises(
        ValueError,
        match=r"kv_cache_config\.tokens_per_block cannot be set: KvCacheConfig of tensorrt_llm",
    ):
        arguments(model, package, kv_cache_config={"tokens_per_block": 64})


def test_a_class_that_the_version_lacks_is_rejected_by_name(model: Path, tmp_path: Path) -> None:
    package = with_classes(load_package(), LoraConfig=None)
    settings = lora(adapter_folder(tmp_path / "a"))

    arguments(model, package)
    with pytest.raises(ExecutorUnavailable, match=r"tensorrt_llm 1\.2\.0 has no LoraConfig"):
        arguments(model, package, lora_config=settings)


def test_a_policy_that_the_version_lacks_is_rejected_by_name(model: Path) -> None:
    class ContextChunkingPolicy:
        FIRST_COME_FIRST_SERVED = 0

    package = with_classes(load_package(), ContextChunkingPolicy=ContextChunkingPolicy)

    with pytest.raises(ValueError, match="scheduler_config cannot be set to EQUAL_PROGRESS"):
        arguments(model, package, scheduler_config={"context_chunking_policy": "EQUAL_PROGRESS"})


def test_an_engine_built_ahead_has_statistics_without_asking(tmp_path: Path) -> None:
    engine = engine_folder(tmp_path / "engine")
    package = without(load_package(), "enable_iter_perf_stats", "cuda_graph_config")

    made = arguments(engine, package, max_batch_size=8)

    assert made["model"] == str(engine)
    assert not {"enable_iter_perf_stats", "cuda_graph_config"} & set(made)
