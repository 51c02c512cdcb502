"""Tests of the fused path on a CUDA device, most of them against the naive model; skipped without a
CUDA device.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.create import create_torch_executor
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.executor import TorchExecutor
from penstock.scheduler.events import Failed
from penstock.scheduler.executor import Executor, ExecutorDied
from penstock.scheduler.request import SamplingParams
from support.core import ends, outputs
from support.quantised_folders import FORMS, load_tensors, save_quantised_model
from support.torch_differential import (
    AMPLE_BLOCKS,
    FEATURE_SETS,
    NUM_SLOTS,
    SCARCE_BLOCKS,
    FeatureSet,
    check_feature_set,
    mixed_specs,
    prompt_error,
    run_mixed,
)
from support.torch_models import (
    ARCHITECTURES,
    FUSED_SHAPES,
    HIDDEN_DIFFERENCES,
    NaiveModel,
    save_tiny_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FUSED = tuple(name for name in ARCHITECTURES if not name.startswith("gemma"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def naive(folder: Path) -> NaiveModel:
    return NaiveModel(folder, device="cuda")


def make_executor(path: Path, **fields: Any) -> Executor:
    config = ExecutorConfig(
        model_path=path, device="cuda", max_num_seqs=NUM_SLOTS, num_blocks=AMPLE_BLOCKS
    )
    return create_torch_executor(replace(config, **fields))


def test_supported_families_use_the_fused_path(name: str, folder: Path) -> None:
    executor = make_executor(folder)

    assert isinstance(executor, TorchExecutor) == (name not in FUSED)
    assert executor.info.pipeline_depth == (2 if name in FUSED else 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", FUSED_SHAPES)
def test_supported_shapes_use_the_fused_path(shape: str, dtype: str, tmp_path: Path) -> None:
    executor = make_executor(save_tiny_model(shape, tmp_path), dtype=dtype, num_blocks=8)

    assert not isinstance(executor, TorchExecutor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", HIDDEN_DIFFERENCES)
def test_a_model_that_computes_more_than_its_tree_is_served_by_its_modules(
    shape: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(shape, tmp_path)

    with caplog.at_level(logging.WARNING):
        executor = make_executor(folder, dtype=dtype)

    assert isinstance(executor, TorchExecutor)
    (reported,) = [record.message for record in caplog.records if "eager path" in record.message]
    assert re.search(HIDDEN_DIFFERENCES[shape], reported)
    error = prompt_error(executor, NaiveModel(folder, device="cuda"))
    assert error < {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}[dtype]


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), [("fp8", "auto"), ("none", "fp8")])
def test_a_wrong_result_in_eight_bits_rejects_the_setting(
    quantization: str, kv_cache_dtype: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_loading: Any = pytest.importorskip("penstock.executor.torch.cuda.fused_loading")
    inner, num_calls = fused_loading.trial_logits, 0

    def wrong(*arguments: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        logits: torch.Tensor = inner(*arguments)
        return logits * (1.1 if num_calls == 2 else 1.0)

    monkeypatch.setattr(fused_loading, "trial_logits", wrong)
    setting = "quantization" if quantization == "fp8" else "kv_cache_dtype"

    with pytest.raises(UnsupportedModel, match=f"^{setting} fp8: .*in 8 bits .* by a factor of 1"):
        make_executor(
            llama, dtype="bfloat16", quantization=quantization, kv_cache_dtype=kv_cache_dtype
        )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", FEATURE_SETS, ids=str)
def test_the_fused_path_equals_a_full_forward(
    way: FeatureSet, depth: int, name: str, folder: Path, naive: NaiveModel
) -> None:
    if name not in FUSED:
        pytest.skip("the eager path serves it")
    check_feature_set(
        way,
        lambda blocks: make_executor(folder, num_blocks=blocks, pipeline_depth=depth),
        naive,
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_options_give_the_same_tokens_on_both_paths(depth: int, name: str, folder: Path) -> None:
    """At depth 2 the scheduler's arrays lag, so positions and the token counts of penalties must
    not be read from them.
    """
    if name not in FUSED:
        pytest.skip("the eager path serves it")
    for sampling in (
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=11),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.7, frequency_penalty=0.8, logit_bias=((5, 2.0),), seed=1),
        SamplingParams(temperature=0.0, num_logprobs=3, num_prompt_logprobs=2),
    ):
        specs = mixed_specs(hashed=False, sampling=sampling)
        eager = TorchExecutor(
            ExecutorConfig(
                model_path=folder, device="cuda", max_num_seqs=NUM_SLOTS, num_blocks=AMPLE_BLOCKS
            )
        )
        fused = make_executor(folder, pipeline_depth=depth)

        reported = run_mixed(fused, specs, budget=24)
        expected = run_mixed(eager, specs, budget=24)

        assert outputs(reported) == outputs(expected)
        found, known = prompt_scores(reported), prompt_scores(expected)
        assert found.keys() == known.keys()
        assert found == pytest.approx(known, abs=1e-3)


def prompt_scores(reported: Any) -> dict[tuple[int, int], float]:
    """Return the prompt log probabilities by (request key, token position). The two paths may chunk
    prompts differently.
    """
    return {
        (key, first + offset): value
        for events in reported
        for key, first, part in events.prompt_logprobs
        for offset, value in enumerate(part.chosen.tolist())
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_the_reference_tokens(dtype: str, name: str, folder: Path) -> None:
    specs = mixed_specs(hashed=True, sampling=SamplingParams(temperature=0.8, num_logprobs=2))

    reported = run_mixed(make_executor(folder, dtype=dtype), specs, budget=64)

    assert {key: len(tokens) for key, tokens in outputs(reported).items()} == {
        spec.key: spec.max_tokens for spec in specs
    }


EIGHT_BIT = [("fp8", "auto"), ("int8", "auto"), ("none", "fp8"), ("fp8", "fp8")]


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), EIGHT_BIT)
def test_eight_bits_give_the_reference_tokens_and_are_reported(
    quantization: str, kv_cache_dtype: str, name: str, folder: Path
) -> None:
    specs = mixed_specs(hashed=True)
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
    }
    if name not in FUSED:
        with pytest.raises(UnsupportedModel, match="the eager path serves this model"):
            make_executor(folder, **fields)
        return
    executor = make_executor(folder, **fields)
    reported = run_mixed(executor, specs, budget=24)

    assert all(len(outputs(reported)[spec.key]) == spec.max_tokens for spec in specs)
    info = executor.info
    pages = "bfloat16" if kv_cache_dtype == "auto" else "float8_e4m3fn"
    assert (info.quantization, info.kv_cache_dtype) == (quantization, pages)


def test_pages_in_fp8_follow_the_magnitude_of_keys_and_values(tmp_path: Path) -> None:
    """The scaled model has keys above and values below the range of e4m3; its outputs are equal to
    the outputs of the plain model.
    """
    plain = save_tiny_model("llama", tmp_path / "plain")
    scaled = save_tiny_model("llama", tmp_path / "scaled")
    tensors = load_file(scaled / "model.safetensors")
    powers = {"q_proj": -10, "k_proj": 10, "v_proj": -10, "o_proj": 10}
    for name in tensors:
        tensors[name] *= 2.0 ** powers.get(name.split(".")[-2], 0)
    save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    specs = mixed_specs(hashed=False, sampling=sampling)

    reported = [
        run_mixed(make_executor(path, dtype="bfloat16", kv_cache_dtype="fp8"), specs, budget=24)
        for path in (plain, scaled)
    ]

    assert outputs(reported[0]) == outputs(reported[1])
    assert prompt_scores(reported[0]) == pytest.approx(prompt_scores(reported[1]), abs=1e-3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("one-llama"))


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        ("DeviceSampler", "max_num_seqs"),
        ("run_widest_step", "max_num_batched_tokens"),
        ("FusedExecutor", "kv_memory_fraction"),
    ],
)
def test_out_of_memory_at_load_names_the_setting(
    part: str, setting: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"penstock.executor.torch.cuda.fused_loading.{part}", fail)

    with pytest.raises(ValueError, match=f"^{setting} requires more memory"):
        make_executor(llama, num_blocks=None)


def test_out_of_memory_at_an_admission_is_recovered_from(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=0.9, repetition_penalty=1.3)
    specs = mixed_specs(hashed=False, sampling=sampling)
    expected = outputs(run_mixed(make_executor(llama), specs, budget=24))
    executor: Any = make_executor(llama)
    inner, num_calls = executor._sampler._stage_counts, 0

    def stage(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        inner(*arguments)
        if num_calls % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(executor._sampler, "_stage_counts", stage)

    reported = run_mixed(executor, specs, budget=24)

    assert outputs(reported) == expected
    assert num_calls > len(specs)


def test_a_device_lost_at_an_admission_ends_the_executor(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = make_executor(llama)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(executor._sampler, "update", fail)
    monkeypatch.setattr(executor._queue, "mark", fail)

    with pytest.raises(ExecutorDied, match="unspecified launch failure"):
        run_mixed(executor, mixed_specs(hashed=False)[:1], budget=24)


def test_values_that_are_not_finite_end_a_request_with_its_first_chunk(llama: Path) -> None:
    """The request ends before its blocks are reused, although its logits are still finite."""
    executor: Any = make_executor(llama, pipeline_depth=1)
    with torch.inference_mode():
        executor._packed._model._layers[-1].qkv.weight[-1].fill_(float("inf"))
    spec = max(mixed_specs(hashed=True), key=lambda spec: len(spec.prompt_ids))

    reported = run_mixed(executor, [spec], budget=24)

    (end,) = ends(reported).values()
    assert isinstance(end, Failed)
    assert len(reported) <= 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_on_the_second_device_uses_no_memory_of_the_first(
    depth: int, name: str, folder: Path
) -> None:
    naive = NaiveModel(folder, device="cuda:1")
    with torch.cuda.device(0):
        on_first = torch.cuda.memory_allocated(0)
        if name in FUSED:
            executor = make_executor(
                folder, device="cuda:1", pipeline_depth=depth, num_blocks=SCARCE_BLOCKS
            )
        else:
            executor = make_executor(folder, device="cuda:1", num_blocks=SCARCE_BLOCKS)

        check_feature_set(FEATURE_SETS[-1], lambda _: executor, naive)

        assert torch.cuda.memory_allocated(1) > 0
        assert torch.cuda.memory_allocated(0) == on_first


def peak_of(make: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `make`, and the largest number of bytes of device memory that it had
    allocated at once.
    """
    # Tensors in reference cycles of earlier tests, freed by `make`, would lower the figure.
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = make()
    return made, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_an_8_bit_checkpoint_is_never_expanded_on_the_device(
    quantization: str, form: str, tmp_path: Path
) -> None:
    save_quantised_model(
        "llama",
        tmp_path,
        form=form,
        dtype=torch.bfloat16,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        # Larger random weights amplify rounding in 24 layers to a fifth of the logits.
        initializer_range=0.02,
    )
    stored = load_tensors(tmp_path)
    num_weights = sum(one.numel() for name, one in stored.items() if "_proj.weight" in name)
    _, wide_peak = peak_of(lambda: make_executor(tmp_path))

    executor, peak = peak_of(lambda: make_executor(tmp_path, quantization=quantization))

    assert peak < wide_peak - num_weights / 2
    specs = mixed_specs(hashed=False)
    reported = run_mixed(executor, specs, budget=24)
    assert all(len(outputs(reported)[spec.key]) == spec.max_tokens for spec in specs)
    if quantization == "fp8":
        name = "model.layers.23.mlp.down_proj.weight"
        found = executor._packed._model._layers[-1].down
        scale = stored[f"{name}_scale"].flatten().expand(len(found.scale))
        assert torch.equal(found.weight.float().cpu(), stored[name].float())
        assert torch.equal(found.scale.cpu(), scale)
