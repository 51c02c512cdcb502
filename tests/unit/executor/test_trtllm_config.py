"""The ranges of the TensorRT-LLM executor's settings, and which settings depend on others."""

from typing import Any

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

NGRAM: dict[str, Any] = {"decoding_type": "NGram", "max_draft_len": 3}


def configured(**values: Any) -> TrtllmConfig:
    return from_json_value(TrtllmConfig, values, "trtllm-config")


def at(path: str, value: Any) -> dict[str, Any]:
    """Return nested settings with this value at a path of names separated by dots."""
    for name in reversed(path.split(".")):
        value = {name: value}
    found: dict[str, Any] = value
    return found


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


OUT_OF_RANGE: list[tuple[str, Any]] = [
    *(("max_batch_size", value) for value in (0, 65_537, 10**22, -(10**4000))),
    *(("max_num_tokens", value) for value in (0, 2**31)),
    *(("max_seq_len", value) for value in (1, 2**31)),
    *(("tensor_parallel_size", value) for value in (0, 10**9)),
    *(("pipeline_parallel_size", value) for value in (0, 10**9)),
    *(("kv_cache_config.max_tokens", value) for value in (0, 2**63)),
    *(("kv_cache_config.host_cache_size", value) for value in (-1, 2**63)),
    *(("kv_cache_config.tokens_per_block", value) for value in (0, 2**99)),
    *(("cuda_graph_config.batch_sizes", value) for value in ([0], [10**9])),
    ("cuda_graph_config.max_batch_size", 0),
    ("lora_config.max_lora_rank", 0),
    *(("lora_config.max_loras", value) for value in (0, 10**9)),
    ("lora_config.max_cpu_loras", 0),
]


@pytest.mark.parametrize(("path", "value"), OUT_OF_RANGE, ids=lambda part: str(part)[:40])
def test_a_value_out_of_range_is_named(path: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^trtllm-config\.{path}.* must be in "):
        configured(**at(path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("max_batch_size", 0, r"must be in 1\.\..*, not 0$"),
        ("max_batch_size", 10**22, r"must be in 1\.\.65536, not an integer of more than 64 bits$"),
        ("dtype", "fp8", "must be one of auto, .*not 'fp8'"),
        ("attn_backend", "", "must not be empty"),
        ("sampler_type", "Torch", "must be one of 'auto'"),
        ("sampler_honours", ["luck"], r"\[0\] must be one of 'penalties'"),
        ("sampler_honours", ["seed", "seed"], " must not contain duplicates"),
        ("guided_decoding_backend", "outlines", "must be one of"),
        ("max_batch", 3, " is unknown"),
        ("max_num_tokens", 255, r"must be at least .*max_batch_size \(256\)"),
        ("kv_cache_config.free_gpu_memory_fraction", 0, "must be"),
        ("kv_cache_config.free_gpu_memory_fraction", 1.1, "must be"),
        ("kv_cache_config.max_tokens", 31, "must be at least one block of 32"),
        ("kv_cache_config.tokens_per_block", 24, "must be a power of 2"),
        ("kv_cache_config.dtype", "int3", "must be one of auto, fp8, nvfp4"),
        (
            "scheduler_config.capacity_scheduler_policy",
            "STATIC_BATCH",
            "must be one of 'GUARANTEED_NO_EVICT', 'MAX_UTILIZATION'",
        ),
        ("cuda_graph_config.batch_sizes", [1, 512], r"must be at most .*\(256\)"),
        ("cuda_graph_config.max_batch_size", 257, r"must be at most .*\(256\)"),
        ("speculative_config.decoding_type", "Medusa", "must be one of 'NGram'"),
        ("watch.load_timeout_s", 2e9, "must be above 0 and at most 1000000000"),
        ("watch.load_timeout_s", 10**400, "must be above 0 and at most"),
        ("watch.response_timeout_s", 0, "must be above 0"),
        ("watch.abort_timeout_s", float("inf"), "must be above 0 and at most"),
    ],
)
def test_an_invalid_value_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^trtllm-config(\.|: ){path} ?{message}"):
        configured(**at(path, value))


@pytest.mark.parametrize(
    ("values", "message"),
    [
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
        ({"cuda_graph_config": {"batch_sizes": [4], "max_batch_size": 8}}, "the largest of batch"),
        ({"lora_config": adapters(("", 1))}, r"adapters\[0\]\.name must not be empty"),
        ({"lora_config": adapters(("a", 0))}, r"adapters\[0\]\.id must be in"),
        ({"lora_config": adapters(("a", 2**31))}, r"adapters\[0\]\.id must be in"),
        ({"lora_config": adapters(("a", 1), ("a", 2))}, "adapters must differ in name"),
        ({"lora_config": adapters(("a", 1), ("b", 1))}, "adapters must differ in id"),
    ],
)
def test_contradicting_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^trtllm-config.*{message}"):
        configured(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "decoding_type is missing"),
        ({"decoding_type": "NGram"}, "max_draft_len must be given with"),
        ({**NGRAM, "max_draft_len": 0}, "max_draft_len must be in"),
        ({**NGRAM, "max_draft_len": 10**9}, "max_draft_len must be in"),
        (
            {"decoding_type": "Eagle", "max_draft_len": 3},
            "speculative_model must be given with decoding_type Eagle",
        ),
        *(
            ({**NGRAM, name: value}, f"{name} has no effect with decoding_type NGram")
            for name, value in {
                "speculative_model": "/d",
                "num_nextn_predict_layers": 1,
                "eagle3_one_model": False,
            }.items()
        ),
        (
            {"decoding_type": "AUTO", "max_draft_len": 3},
            "max_draft_len has no effect with decoding_type AUTO",
        ),
    ],
)
def test_invalid_speculation_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^trtllm-config.*{message}"):
        configured(speculative_config=values)


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


def test_cuda_graph_settings_may_have_sizes_and_their_maximum() -> None:
    assert CudaGraphSettings(batch_sizes=(1, 8), max_batch_size=8).max_batch_size == 8
