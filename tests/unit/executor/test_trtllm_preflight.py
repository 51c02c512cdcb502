"""Checks before a model is loaded: whether settings fit folders, engines, adapters and GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.config import TrtllmConfig
from penstock.executor.trtllm.model_kind import recognise
from penstock.executor.trtllm.preflight import check_before_load, check_tokenizer
from penstock.server.settings.json_values import from_json_value
from support.trtllm_folders import (
    adapter_folder,
    checkpoint_folder,
    engine_folder,
    hugging_face_folder,
    write_json,
)

ENGINE_SIZES: dict[str, Any] = {"max_batch_size": 64, "max_num_tokens": 2048}


def notices(path: Path, environment: dict[str, str] | None = None, **values: Any) -> str:
    config = from_json_value(TrtllmConfig, values)
    return "; ".join(check_before_load(path, config, environment or {}).notices)


def one_adapter(path: Path) -> dict[str, Any]:
    return {"name": path.name, "path": str(path), "id": len(path.name)}


def test_a_plain_model_gives_no_notice(tmp_path: Path) -> None:
    assert notices(hugging_face_folder(tmp_path)) == ""


def test_models_that_cannot_be_served_are_rejected_with_an_explanation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run `penstock build`"):
        notices(checkpoint_folder(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        notices(tmp_path / "none")


def test_models_that_the_backend_may_not_read_are_reported(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})

    assert "loading will most likely fail" in notices(folder)


def test_lengths_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path)

    assert "max_seq_len is 5000, beyond the 4096" in notices(folder, max_seq_len=5000)
    values: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_tokens": 1024}
    assert r"prompts above max_num_tokens (1024) are rejected" in notices(folder, **values)
    assert notices(folder, **values, max_seq_len=1024) == ""


@pytest.mark.parametrize(("visible", "num"), [("0,1", 2), ("", 0), ("GPU-abc", 1)])
def test_more_gpus_than_are_visible_are_rejected(tmp_path: Path, visible: str, num: int) -> None:
    values = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    folder = hugging_face_folder(tmp_path)

    with pytest.raises(ValueError, match=f"is 4 GPUs; CUDA_VISIBLE_DEVICES shows {num}"):
        notices(folder, {"CUDA_VISIBLE_DEVICES": visible}, **values)
    assert notices(folder, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, **values) == ""
    assert notices(folder, {}, **values) == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel_size must be 2, the engine's, not 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1, the engine's, not 2"),
        ({"max_batch_size": 65}, "max_batch_size must be at most 64, the engine's, not 65"),
        ({"max_num_tokens": 4096}, "max_num_tokens must be at most 2048, the engine's, not 4096"),
        ({"max_seq_len": 3001}, "max_seq_len must be at most 3000, the engine's, not 3001"),
        (
            {"kv_cache_config": {"tokens_per_block": 64}},
            "kv_cache_config.tokens_per_block must be 32, the engine's, not 64",
        ),
    ],
)
def test_settings_beyond_the_sizes_of_an_engine_are_rejected(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    folder = engine_folder(tmp_path, tp_size=2)
    fitting = {**ENGINE_SIZES, "tensor_parallel_size": 2}

    assert notices(folder, **fitting) == ""
    with pytest.raises(ValueError, match=message):
        notices(folder, **{**fitting, **values})


def test_an_engine_is_rejected_where_its_backend_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(
        "tensorrt_llm", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    folder = engine_folder(tmp_path / "engine")

    with pytest.raises(ValueError, match="the installed tensorrt_llm has no TensorRT backend"):
        notices(folder, **ENGINE_SIZES)
    (package / "_tensorrt_engine").mkdir()
    assert notices(folder, **ENGINE_SIZES) == ""


def test_an_engine_of_another_version_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.2.1")

    notice = notices(engine_folder(tmp_path), **ENGINE_SIZES)

    assert "built by TensorRT-LLM 1.2.0; 1.2.1 is installed" in notice


def test_adapters_must_exist_and_fit(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "model")
    large = adapter_folder(tmp_path / "large", rank=128)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")

    def tried(path: Path, **values: Any) -> str:
        return notices(folder, lora_config={"adapters": [one_adapter(path)], **values})

    with pytest.raises(ValueError, match=r"lora_config.adapters\[0\].path: .* cannot be read"):
        tried(tmp_path / "none")
    with pytest.raises(ValueError, match=r"adapters\[0\].path: .* is not valid JSON"):
        tried(broken)
    with pytest.raises(ValueError, match=r"has rank 128, above lora_config.max_lora_rank \(64\)"):
        tried(large)
    assert tried(large, max_lora_rank=128) == ""


def test_adapters_of_other_layers_need_the_layers_named(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "model")
    first = adapter_folder(tmp_path / "a", targets=("q_proj", "v_proj"))
    within = adapter_folder(tmp_path / "bb", targets=("q_proj",))
    beyond = adapter_folder(tmp_path / "ccc", targets=("q_proj", "up_proj"))
    adapters = [one_adapter(path) for path in (first, within, beyond)]

    with pytest.raises(ValueError, match=r"adapters\[2\].path: .* changes up_proj, which"):
        notices(folder, lora_config={"adapters": adapters})
    assert notices(folder, lora_config={"adapters": adapters[:2]}) == ""
    named = {"adapters": adapters, "lora_target_modules": ["attn_q", "mlp_4h_to_h"]}
    assert notices(folder, lora_config=named) == ""


@pytest.mark.parametrize("length", [None, 0, -1, "4096", True, 4096.0])
def test_a_model_without_a_length_needs_one_in_the_settings(tmp_path: Path, length: Any) -> None:
    folder = hugging_face_folder(tmp_path, max_position_embeddings=length)

    with pytest.raises(ValueError, match=r"^max_seq_len must be given: .*has no length"):
        notices(folder)
    assert notices(folder, max_seq_len=64) == ""


@pytest.mark.parametrize("length", [1, 2**31])
def test_a_length_that_cannot_be_one_is_rejected(tmp_path: Path, length: int) -> None:
    folder = hugging_face_folder(tmp_path, max_position_embeddings=length)

    with pytest.raises(ValueError, match=f"^max_seq_len must be given: .* a length of {length}"):
        notices(folder)


@pytest.mark.parametrize("size", [None, 0, -5, "32000", 2**31])
def test_a_model_must_have_a_vocabulary_size(tmp_path: Path, size: Any) -> None:
    folder = hugging_face_folder(tmp_path, vocab_size=size)

    with pytest.raises(ValueError, match=r"config.json gives .*vocab_size$"):
        notices(folder)


def test_an_adapter_nested_too_deep_is_rejected(tmp_path: Path) -> None:
    path = adapter_folder(tmp_path / "a")
    (path / "adapter_config.json").write_text("[" * 99_999)

    with pytest.raises(ValueError, match=r"adapters\[0\].path: .* is nested too deep"):
        notices(
            hugging_face_folder(tmp_path / "model"), lora_config={"adapters": [one_adapter(path)]}
        )


def test_the_draft_model_must_exist(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "model")
    draft = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": str(tmp_path)}

    with pytest.raises(ValueError, match=r"speculative_config.speculative_model: .* contains no"):
        notices(folder, speculative_config=draft)
    draft["speculative_model"] = str(folder)
    assert notices(folder, speculative_config=draft) == ""


def test_an_engine_needs_the_folder_of_its_tokenizer(tmp_path: Path) -> None:
    engine = recognise(engine_folder(tmp_path / "engine"))
    bare = tmp_path / "bare"
    bare.mkdir()
    other = hugging_face_folder(tmp_path / "other", vocab_size=7)
    odd = tmp_path / "odd"
    write_json(odd / "config.json", {})
    write_json(odd / "tokenizer.json", {})

    with pytest.raises(ValueError, match=r"tokenizer must be given: .* has no tokenizer.json"):
        check_tokenizer(engine, None)
    with pytest.raises(ValueError, match=r"tokenizer: .* has no tokenizer.json"):
        check_tokenizer(engine, bare)
    with pytest.raises(ValueError, match="tokenizer must be a Hugging Face folder"):
        check_tokenizer(engine, odd)
    with pytest.raises(ValueError, match=r"a model with 7 token ids, .* has 32000"):
        check_tokenizer(engine, other)
    check_tokenizer(engine, hugging_face_folder(tmp_path / "same"))
    check_tokenizer(recognise(tmp_path / "same"), None)
