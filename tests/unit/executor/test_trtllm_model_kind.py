"""The kind of a model folder, determined from its small files without reading weights, and
explained in one sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.executor.models import resolve_model
from penstock.executor.trtllm.model_kind import ModelKind, Quantisation, recognise
from support.trtllm_folders import (
    LLAMA,
    checkpoint_folder,
    engine_folder,
    hugging_face_folder,
    modelopt_folder,
    write_json,
)


def test_the_packaged_model_is_a_plain_one() -> None:
    folder = recognise(resolve_model("demo"))

    assert folder.kind is ModelKind.HUGGING_FACE
    assert folder.quantisation is None
    assert folder.vocab_size
    assert folder.max_seq_len
    assert "serves it unchanged" in folder.explanation


def test_a_plain_model(tmp_path: Path) -> None:
    folder = recognise(hugging_face_folder(tmp_path))

    assert (folder.kind, folder.path) == (ModelKind.HUGGING_FACE, tmp_path)
    assert (folder.vocab_size, folder.max_seq_len) == (32000, 4096)
    assert not folder.is_engine


def test_sizes_of_a_model_with_several_parts_are_those_of_its_text(tmp_path: Path) -> None:
    text = {"vocab_size": 99, "max_position_embeddings": 77}
    write_json(
        tmp_path / "config.json",
        {"model_type": "gemma3", "text_config": text, "max_position_embeddings": 5},
    )

    folder = recognise(tmp_path)

    assert (folder.vocab_size, folder.max_seq_len) == (99, 77)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_modelopt_checkpoints_are_served_as_they_are(tmp_path: Path, algorithm: str) -> None:
    folder = recognise(modelopt_folder(tmp_path, algorithm, "FP8"))

    assert folder.kind is ModelKind.QUANTISED
    assert folder.quantisation == Quantisation(algorithm=algorithm, kv_cache="FP8")
    assert f"quantised to {algorithm} with a KV cache in FP8" in folder.explanation
    assert "reads that from the checkpoint" in folder.explanation


def test_a_checkpoint_may_quantise_only_its_cache(tmp_path: Path) -> None:
    folder = recognise(modelopt_folder(tmp_path, None, "FP8"))

    assert folder.quantisation == Quantisation(algorithm="NO_QUANT", kv_cache="FP8")


def test_modelopt_files_without_an_algorithm_quantise_nothing(tmp_path: Path) -> None:
    assert recognise(modelopt_folder(tmp_path, None)).kind is ModelKind.HUGGING_FACE


@pytest.mark.parametrize(
    ("settings", "algorithm", "is_readable"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8_BLOCK_SCALES", True),
        ({"quant_method": "fp8"}, "FP8", False),
        ({"quant_method": "mxfp4"}, "MXFP4", True),
        ({"quant_method": "gptq", "bits": 4}, "INT4 GPTQ", False),
        ({"quant_method": "awq", "w_bit": 4}, "INT4 AWQ", False),
        ({"quant_method": "awq"}, "AWQ", False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "INT8 (bitsandbytes)", False),
        ({"quant_method": "bitsandbytes"}, "4 bits (bitsandbytes)", False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4", False),
        ({"quant_method": "hqq"}, "hqq", False),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "int"},
                        "input_activations": {"num_bits": 8},
                    }
                },
            },
            "W8A8 (compressed-tensors, int-quantized)",
            False,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "FP8 (compressed-tensors)",
            False,
        ),
    ],
)
def test_quantisation_by_other_tools_is_named(
    tmp_path: Path, settings: dict[str, Any], algorithm: str, is_readable: bool
) -> None:
    folder = recognise(hugging_face_folder(tmp_path, quantization_config=settings))

    assert folder.kind is ModelKind.QUANTISED
    assert folder.quantisation == Quantisation(algorithm=algorithm, is_readable=is_readable)
    assert algorithm in folder.explanation
    assert ("does not read" in folder.explanation) is not is_readable


def test_a_quantisation_in_the_text_config_is_read(tmp_path: Path) -> None:
    text = {"vocab_size": 9, "quantization_config": {"quant_method": "mxfp4"}}

    folder = recognise(hugging_face_folder(tmp_path, text_config=text))

    assert folder.quantisation == Quantisation(algorithm="MXFP4")


def test_a_checkpoint_has_to_be_built(tmp_path: Path) -> None:
    folder = recognise(checkpoint_folder(tmp_path))

    assert folder.kind is ModelKind.CHECKPOINT
    assert folder.quantisation == Quantisation(algorithm="W8A8_SQ_PER_CHANNEL", kv_cache="INT8")
    assert "penstock build" in folder.explanation
    assert (folder.tensor_parallel_size, folder.pipeline_parallel_size) == (1, 1)


def test_an_engine_reports_what_it_was_built_for(tmp_path: Path) -> None:
    folder = recognise(engine_folder(tmp_path, tp_size=2))

    assert folder.kind is ModelKind.ENGINE
    assert folder.is_engine
    assert (folder.tensor_parallel_size, folder.pipeline_parallel_size) == (2, 1)
    assert (folder.max_batch_size, folder.max_num_tokens, folder.max_seq_len) == (64, 2048, 3000)
    assert (folder.vocab_size, folder.tokens_per_block) == (32000, 32)
    assert folder.built_by == "1.2.0"
    assert "built by TensorRT-LLM 1.2.0" in folder.explanation


def test_an_engine_without_version_is_shown_without_it(tmp_path: Path) -> None:
    assert "of unknown version" in recognise(engine_folder(tmp_path, version=None)).explanation


def test_an_incomplete_folder_is_of_unknown_kind(tmp_path: Path) -> None:
    (checkpoint_folder(tmp_path / "checkpoint") / "rank0.safetensors").unlink()
    (engine_folder(tmp_path / "engine") / "rank0.engine").unlink()

    checkpoint, engine = recognise(tmp_path / "checkpoint"), recognise(tmp_path / "engine")

    assert (checkpoint.kind, engine.kind) == (ModelKind.UNKNOWN, ModelKind.UNKNOWN)
    assert "contains no rank0.safetensors" in checkpoint.explanation
    assert "contains no rank0.engine" in engine.explanation


def test_folders_of_unknown_kind_have_an_explanation(tmp_path: Path) -> None:
    missing, empty, broken, odd, listed = (tmp_path / name for name in "abcde")
    empty.mkdir()
    broken.mkdir()
    (broken / "config.json").write_text("{")
    write_json(odd / "config.json", {"colour": "blue"})
    write_json(listed / "config.json", [])

    folders = [recognise(path) for path in (missing, empty, broken, odd, listed)]

    assert {folder.kind for folder in folders} == {ModelKind.UNKNOWN}
    explanations = [folder.explanation for folder in folders]
    assert f"{missing} is not a folder" in explanations[0]
    assert "contains no config.json" in explanations[1]
    assert "config.json is not valid JSON" in explanations[2]
    assert "is neither a Hugging Face model nor" in explanations[3]
    assert "config.json must contain a JSON object" in explanations[4]


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_file_nested_too_deep_is_explained(tmp_path: Path, name: str) -> None:
    hugging_face_folder(tmp_path)
    (tmp_path / name).write_text("[" * 99_999)

    folder = recognise(tmp_path)

    assert folder.kind is ModelKind.UNKNOWN
    assert f"{name} is nested too deep" in folder.explanation


def test_a_broken_quantisation_file_is_not_passed_over(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("[1")

    folder = recognise(tmp_path)

    assert folder.kind is ModelKind.UNKNOWN
    assert "hf_quant_config.json is not valid JSON" in folder.explanation


def test_sizes_of_a_wrong_type_are_unknown(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**LLAMA, "vocab_size": True})

    assert recognise(tmp_path).vocab_size is None
