"""The settings of the TensorRT-LLM executor: ranges, dependencies, their table."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from penstock.executor.trtllm.config import (
    CapacityPolicy,
    CudaGraphSettings,
    DecodingType,
    KvCacheSettings,
    SamplerType,
    TrtllmConfig,
)
from penstock.server.settings.json_values import from_json_value, to_json_value

README = Path(__file__).resolve().parents[3] / "executors" / "README.md"
NGRAM: dict[str, Any] = {"decoding_type": "NGram", "max_draft_len": 3}


def configured(**values: Any) -> TrtllmConfig:
    return from_json_value(TrtllmConfig, values, "trtllm-config")


def adapters(*names_and_ids: tuple[str, int]) -> dict[str, Any]:
    return {"adapters": [{"name": name, "path": "/a", "id": id_} for name, id_ in names_and_ids]}


def test_the_defaults_are_the_documented_ones() -> None:
    config = configured()

    assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len) == (256, 8192, None)
    assert config.enable_chunked_prefill
    assert config.kv_cache_config == KvCacheSettings(
        free_gpu_memory_fraction=0.9, tokens_per_block=32, enable_block_reuse=True
    )
    policy = config.scheduler_config.capacity_scheduler_policy
    assert policy is CapacityPolicy.GUARANTEED_NO_EVICT
    assert config.sampler_type is SamplerType.AUTO
    assert config.guided_decoding_backend is None
    assert config.speculative_config is None
    assert config.watch.response_timeout_s == 120.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch_size": 0}, r"trtllm-config.max_batch_size must be in 1\.\..*, not 0"),
        ({"max_num_tokens": 0}, "trtllm-config.max_num_tokens must be in"),
        ({"max_num_tokens": 255}, r"max_num_tokens must be at least .*max_batch_size \(256\)"),
        ({"max_seq_len": 1}, "max_seq_len must be in"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be in"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be in"),
        ({"max_batch_size": 10**22}, "max_batch_size must be in 1..65536, not an integer of more"),
        ({"max_batch_size": 65_537}, r"max_batch_size must be in 1\.\..*, not 65537"),
        (
            {"max_batch_size": -(10**4000)},
            "must be in 1..65536, not an integer of more than 64 bits$",
        ),
        ({"max_num_tokens": 2**31}, r"max_num_tokens must be in 1\.\..*, not 2147483648"),
        ({"max_seq_len": 2**31}, "max_seq_len must be in"),
        ({"tensor_parallel_size": 10**9}, "tensor_parallel_size must be in"),
        ({"pipeline_parallel_size": 10**9}, "pipeline_parallel_size must be in"),
        ({"kv_cache_config": {"max_tokens": 2**63}}, "kv_cache_config.max_tokens must be in"),
        ({"kv_cache_config": {"host_cache_size": 2**63}}, "host_cache_size must be in"),
        (
            {"kv_cache_config": {"tokens_per_block": 2**99}},
            "tokens_per_block must be in",
        ),
        ({"cuda_graph_config": {"batch_sizes": [10**9]}}, "batch_sizes must be in"),
        ({"lora_config": adapters(("a", 2**31))}, r"adapters\[0\]\.id must be in"),
        ({"lora_config": {"max_loras": 10**9}}, "lora_config.max_loras must be in"),
        ({"speculative_config": NGRAM | {"max_draft_len": 10**9}}, "max_draft_len must be in"),
        (
            {"watch": {"load_timeout_s": 2e9}},
            r"load_timeout_s must be above 0 and at most 1000000000",
        ),
        ({"watch": {"load_timeout_s": 10**400}}, "load_timeout_s must be above 0 and at most"),
        ({"dtype": "fp8"}, "dtype must be one of auto, .*not 'fp8'"),
        ({"attn_backend": ""}, "attn_backend must not be empty"),
        ({"sampler_type": "Torch"}, "trtllm-config.sampler_type must be one of 'auto'"),
        ({"sampler_honours": ["luck"]}, r"sampler_honours\[0\] must be one of 'penalties'"),
        ({"sampler_honours": ["seed", "seed"]}, "sampler_honours must not contain duplicates"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend must be one of"),
        ({"max_batch": 3}, "trtllm-config.max_batch is unknown"),
        (
            {"max_num_tokens": 16, "max_batch_size": 8},
            r"max_num_tokens must be at least kv_cache_config.tokens_per_block \(32\)",
        ),
        (
            {"sampler_type": "TRTLLMSampler", "speculative_config": NGRAM},
            "sampler_type TRTLLMSampler does not work with speculative_config",
        ),
        (
            {
                "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
                "guided_decoding_backend": "xgrammar",
            },
            "capacity_scheduler_policy MAX_UTILIZATION does not work with guided_decoding_backend",
        ),
        (
            {
                "enable_chunked_prefill": False,
                "scheduler_config": {"context_chunking_policy": "EQUAL_PROGRESS"},
            },
            "context_chunking_policy requires enable_chunked_prefill",
        ),
    ],
)
def test_what_is_off_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(**values)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("kv_cache_config", {"free_gpu_memory_fraction": 0}, "free_gpu_memory_fraction must be"),
        ("kv_cache_config", {"free_gpu_memory_fraction": 1.1}, "free_gpu_memory_fraction must be"),
        ("kv_cache_config", {"max_tokens": 0}, "max_tokens must be in"),
        ("kv_cache_config", {"max_tokens": 31}, "max_tokens must be at least one block of 32"),
        ("kv_cache_config", {"tokens_per_block": 24}, "tokens_per_block must be a power of 2"),
        ("kv_cache_config", {"tokens_per_block": 0}, "tokens_per_block must be in 1"),
        ("kv_cache_config", {"host_cache_size": -1}, "host_cache_size must be in"),
        ("kv_cache_config", {"dtype": "int3"}, "dtype must be one of auto, fp8, nvfp4"),
        (
            "scheduler_config",
            {"capacity_scheduler_policy": "STATIC_BATCH"},
            "capacity_scheduler_policy must be one of 'GUARANTEED_NO_EVICT', 'MAX_UTILIZATION'",
        ),
        ("cuda_graph_config", {"batch_sizes": [0]}, "batch_sizes must be in"),
        ("cuda_graph_config", {"max_batch_size": 0}, "max_batch_size must be in"),
        ("cuda_graph_config", {"batch_sizes": [4], "max_batch_size": 8}, "the largest of batch"),
        ("cuda_graph_config", {"batch_sizes": [1, 512]}, r"batch_sizes must be at most .*\(256\)"),
        ("cuda_graph_config", {"max_batch_size": 257}, r"max_batch_size must be at most .*\(256\)"),
        ("lora_config", adapters(("", 1)), r"adapters\[0\]\.name must not be empty"),
        ("lora_config", adapters(("a", 0)), r"adapters\[0\]\.id must be in"),
        ("lora_config", adapters(("a", 1), ("a", 2)), "adapters must differ in name"),
        ("lora_config", adapters(("a", 1), ("b", 1)), "adapters must differ in id"),
        ("lora_config", {"max_lora_rank": 0}, "max_lora_rank must be in"),
        ("lora_config", {"max_loras": 0}, "max_loras must be in"),
        ("lora_config", {"max_cpu_loras": 0}, "max_cpu_loras must be in"),
        ("speculative_config", {}, "decoding_type is missing"),
        ("speculative_config", {"decoding_type": "Medusa"}, "decoding_type must be one of 'NGram'"),
        ("speculative_config", {"decoding_type": "NGram"}, "max_draft_len must be given with"),
        ("speculative_config", {**NGRAM, "max_draft_len": 0}, "max_draft_len must be in"),
        (
            "speculative_config",
            {"decoding_type": "Eagle", "max_draft_len": 3},
            "speculative_model must be given with decoding_type Eagle",
        ),
        (
            "speculative_config",
            {**NGRAM, "speculative_model": "/d"},
            "speculative_model has no effect with decoding_type NGram",
        ),
        (
            "speculative_config",
            {"decoding_type": "AUTO", "max_draft_len": 3},
            "max_draft_len has no effect with decoding_type AUTO",
        ),
        (
            "speculative_config",
            {**NGRAM, "num_nextn_predict_layers": 1},
            "num_nextn_predict_layers has no effect with decoding_type NGram",
        ),
        (
            "speculative_config",
            {**NGRAM, "eagle3_one_model": False},
            "eagle3_one_model has no effect with decoding_type NGram",
        ),
        ("watch", {"response_timeout_s": 0}, "response_timeout_s must be above 0"),
        ("watch", {"abort_grace_s": float("inf")}, "abort_grace_s must be above 0 and at most"),
    ],
)
def test_what_is_off_in_a_section_is_named(
    section: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^trtllm-config.*{message}"):
        configured(**{section: values})


def test_every_kind_of_speculation_can_be_configured() -> None:
    models = {DecodingType.EAGLE, DecodingType.DRAFT_TARGET}
    lengths = {*models, DecodingType.NGRAM}
    for kind in DecodingType:
        values: dict[str, Any] = {"decoding_type": kind.value}
        values |= {"max_draft_len": 2} if kind in lengths else {}
        values |= {"speculative_model": "/d"} if kind in models else {}
        config = configured(speculative_config=values)
        assert config.speculative_config is not None
        assert config.speculative_config.decoding_type is kind


def test_the_json_form_survives_a_round_trip() -> None:
    config = configured(
        kv_cache_config={"max_tokens": 4096, "dtype": "fp8", "enable_block_reuse": False},
        scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
        cuda_graph_config={"enabled": False},
        lora_config=adapters(("a", 1), ("b", 2)),
        speculative_config=NGRAM,
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
    )

    assert configured(**to_json_value(config)) == config
    assert config.world_size == 8
    assert not config.cuda_graph_config.enabled


def test_graphs_that_name_sizes_may_name_their_largest() -> None:
    assert CudaGraphSettings(batch_sizes=(1, 8), max_batch_size=8).max_batch_size == 8


def test_the_readme_lists_every_key_and_no_other() -> None:
    text = README.read_text(encoding="utf-8")
    section = text.split("## Settings of the TensorRT-LLM executor")[1].split("\n## ")[0]
    first_cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    listed = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]

    assert sorted(listed) == sorted(key_paths(TrtllmConfig, ""))


def key_paths(kind: type[Any], prefix: str) -> list[str]:
    paths: list[str] = []
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        nested = nested_settings(hints[field.name])
        if nested is None:
            paths.append(prefix + field.name)
        else:
            paths += key_paths(nested, f"{prefix}{field.name}.")
    return paths


def nested_settings(hint: Any) -> type[Any] | None:
    """Return the dataclass inside `hint`: itself, in a union with None, or in a tuple."""
    candidates: list[Any] = [hint, *getattr(hint, "__args__", ())]
    found = [item for item in candidates if isinstance(item, type)]
    return next((item for item in found if dataclasses.is_dataclass(item)), None)
