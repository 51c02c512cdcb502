"""How 8-bit checkpoints are read, and errors that name what is not supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch import loading
from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel
from penstock.executor.torch.fused_weights import LayerWeights, fuse_weights
from penstock.executor.torch.loading import load_configured, load_model
from penstock.executor.torch.module_tree import read_module_tree
from penstock.executor.torch.quantised_weights import WideLayers, quantise, quantise_layers
from penstock.executor.torch.trial_reference import make_reference
from penstock.executor.torch.whole_sequence import module_logits
from support.quantised_folders import (
    COMPRESSED,
    FORMS,
    change_config,
    load_tensors,
    save_quantised_model,
    save_tensors,
    store_quantised,
)
from support.torch_models import save_tiny_model
from unit.executor.live_bytes import LiveBytes

IDS = torch.arange(40, 64)
QKV = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
DOWN = "model.layers.1.mlp.down_proj.weight"
MAPPED = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 copies what it is given"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path)


@pytest.mark.parametrize("keeps_eight_bit", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_read_as_it_is_stored(
    form: str, keeps_eight_bit: bool, folder: Path
) -> None:
    plain = load_model(folder, device="cpu", dtype="float32")
    stored = load_tensors(save_quantised_model("llama", folder, form=form))

    model = load_model(folder, device="cpu", dtype="float32", keeps_eight_bit=keeps_eight_bit)

    exact = stored[DOWN].float() * stored[f"{DOWN}_scale"]
    weight = model.module.get_parameter(DOWN)
    if keeps_eight_bit:
        assert weight.dtype == torch.float8_e4m3fn
        assert torch.equal(weight.float(), stored[DOWN].float())
        scale = model.module.get_buffer(DOWN.replace("weight", "scale"))
        assert torch.equal(weight.float() * scale[:, None], exact)
    else:
        assert torch.equal(weight, exact)
    before = plain.module.get_parameter(DOWN)
    assert float((exact - before).norm() / before.norm()) < 0.04
    assert model.dtype == torch.float32


SHAPES = [
    "llama", "phi3", "gemma3",
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("llama_tied_no_groups", "llama_biases", "qwen2", "qwen3")
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_that_stay_in_eight_bits_compute_what_wide_ones_do(
    shape: str, form: str, kind: str, tmp_path: Path
) -> None:
    save_quantised_model(shape, tmp_path, form=form, kind=kind, dtype=torch.bfloat16)

    narrow, wide = (
        load_model(tmp_path, device="cpu", dtype="auto", keeps_eight_bit=keeps_eight_bit)
        for keeps_eight_bit in (True, False)
    )

    assert narrow.dtype == wide.dtype == torch.bfloat16
    assert torch.equal(module_logits(narrow, IDS), module_logits(wide, IDS))


@pytest.mark.parametrize("name", ["llama", "llama_tied_no_groups"])
def test_a_head_in_eight_bits_is_widened_and_leaves_the_embedding_alone(
    name: str, tmp_path: Path
) -> None:
    folder = save_quantised_model(name, tmp_path, form="modelopt")
    tensors = load_tensors(folder)
    embedding = tensors["model.embed_tokens.weight"]
    values, scale = quantise(tensors.get("lm_head.weight", embedding), "fp8")
    tensors |= {"lm_head.weight": values, "lm_head.weight_scale": scale}
    save_tensors(folder, tensors)

    module = load_model(folder, device="cpu", dtype="auto", keeps_eight_bit=True).module

    assert torch.equal(module.get_parameter("model.embed_tokens.weight"), embedding)
    head = module.get_parameter("lm_head.weight")
    # transformers 4 ties a head to the embedding even if both are stored.
    is_tied = head is module.get_parameter("model.embed_tokens.weight")
    assert is_tied or torch.equal(head, values.float() * scale[:, None])
    assert not is_tied or name == "llama_tied_no_groups"


def quantised_layers(folder: Path, quantization: str) -> list[LayerWeights]:
    model = load_model(folder, device="cpu", dtype="bfloat16", keeps_eight_bit=True)
    tree = read_module_tree(model)
    layers = fuse_weights(tree)
    quantise_layers(tree, layers, quantization)
    assert not any(linear.weight.numel() for layer in tree.layers for linear in layer.qkv)
    return layers


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_the_fused_step_takes_weights_and_scales_as_they_are_stored(
    form: str, kind: str, tmp_path: Path
) -> None:
    save_quantised_model("llama_biases", tmp_path, form=form, kind=kind)
    stored = load_tensors(tmp_path)

    layer = quantised_layers(tmp_path, kind)[1]

    for found, names in ((layer.qkv, QKV), (layer.down, [DOWN])):
        assert found.scale is not None
        assert torch.equal(
            found.weight.view(torch.int8),
            torch.cat([stored[name] for name in names]).view(torch.int8),
        )
        assert torch.equal(found.scale, torch.cat([channel_scales(stored, name) for name in names]))
        assert found.bias is not None
        biases = [stored[name.replace("weight", "bias")] for name in names]
        assert torch.equal(found.bias, torch.cat(biases).bfloat16())


def test_weights_in_another_format_are_quantised_from_wide_ones(tmp_path: Path) -> None:
    """All weights of layer 0 are stored in fp8. In layer 1, one of the three weights that are
    joined is stored in bfloat16.
    """
    save_quantised_model("llama", tmp_path, form="modelopt")
    stored = load_tensors(tmp_path)
    stored[QKV[1]] = stored[QKV[1]].bfloat16()
    del stored[f"{QKV[1]}_scale"]
    save_tensors(tmp_path, stored)
    first = [name.replace("layers.1", "layers.0") for name in QKV]

    for quantization, layer, names in (("int8", 0, first), ("int8", 1, QKV), ("fp8", 1, QKV)):
        found = quantised_layers(tmp_path, quantization)[layer].qkv

        values, scale = quantise(torch.cat([wide(stored, name) for name in names]), quantization)
        assert found.scale is not None
        assert torch.equal(found.weight.float(), values.float())
        assert torch.equal(found.scale, scale)


def channel_scales(stored: dict[str, Tensor], name: str) -> Tensor:
    return stored[f"{name}_scale"].flatten().expand(len(stored[name]))


def wide(stored: dict[str, Tensor], name: str) -> Tensor:
    if stored[name].dtype == torch.bfloat16:
        return stored[name]
    return (stored[name].float() * channel_scales(stored, name)[:, None]).bfloat16()


NUM_LAYERS = 16


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a model whose memory is nearly all in its layers' linear weights."""
    # So that transformers allocates in the thread in which allocations are counted.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    return save_quantised_model(
        "llama",
        tmp_path,
        form="modelopt",
        dtype=torch.bfloat16,
        num_hidden_layers=NUM_LAYERS,
        hidden_size=256,
        intermediate_size=1024,
    )


def num_linear_weights(folder: Path) -> int:
    return sum(one.numel() for name, one in load_tensors(folder).items() if "_proj.weight" in name)


@MAPPED
def test_the_host_holds_no_copy_of_weights_that_go_to_a_device(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*_: object) -> None:
        raise UnsupportedModel("not on this device")

    monkeypatch.setattr(loading, "probe_model", probe)

    with LiveBytes() as live, pytest.raises(UnsupportedModel, match="not on this device"):
        load_model(deep, device="meta", dtype="auto", keeps_eight_bit=True)

    assert live.peak < num_linear_weights(deep) / NUM_LAYERS


def test_the_host_holds_wide_weights_once(deep: Path) -> None:
    with LiveBytes() as live:
        load_model(deep, device="cpu", dtype="auto")

    num_bytes = 2 * num_linear_weights(deep)
    assert num_bytes <= live.peak < num_bytes * (1 + 4 / NUM_LAYERS)


@MAPPED
@pytest.mark.parametrize("quantization", [pytest.param("fp8", marks=pytest.mark.nightly), "int8"])
def test_few_layers_are_wide_at_a_time_until_the_fused_step_runs(
    quantization: str, deep: Path
) -> None:
    with LiveBytes() as live:
        model = load_model(deep, device="cpu", dtype="auto", keeps_eight_bit=True)
        tree = read_module_tree(model)
        make_reference(model, tree, len(IDS))
        layers = fuse_weights(tree)
        for wide_layer in WideLayers(layers, model.dtype):
            assert wide_layer.down.weight.dtype == model.dtype
        quantise_layers(tree, layers, quantization)

    # Joined weights are copies here and others mapped; on a device all are copies.
    in_eight_bits = num_linear_weights(deep)
    assert live.peak < in_eight_bits * (1 + 2 * 4 / NUM_LAYERS)


def test_a_gpu_gets_eight_bits_where_the_setting_asks_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        loading, "load_model", lambda *_, keeps_eight_bit, **__: asked.append(keeps_eight_bit)
    )

    for device, quantization in (
        ("cuda:1", "fp8"),
        ("cuda", "int8"),
        ("cuda", "none"),
        ("cpu", "int8"),
    ):
        load_configured(ExecutorConfig(model_path=folder, device=device, quantization=quantization))

    assert asked == [True, True, False, False]


def test_too_little_memory_for_wide_weights_names_the_setting_that_keeps_them_narrow(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    save_quantised_model("llama", folder, form="modelopt")
    monkeypatch.setattr(loading, "widen", too_large)

    with pytest.raises(ModelLoadError, match=r"set quantization, which keeps .* in 8 bits, a dev"):
        load_model(folder, device="cpu", dtype="auto")


def test_a_weight_without_a_module_is_named(folder: Path) -> None:
    save_quantised_model("llama", folder, form="modelopt")
    tensors = load_tensors(folder)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    save_tensors(folder, tensors | {name: tensors[DOWN].clone(), f"{name}_scale": torch.ones(1)})

    with pytest.raises(UnsupportedModel, match=r"experts\.0\.up_proj\.weight is in 8 bits"):
        load_model(folder, device="cpu", dtype="auto")


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"num_bits": 4}, "4 bits"),
        ({"strategy": "block"}, "strategy block"),
        ({"symmetric": False}, "zero points"),
        (None, r"config_groups\.group_0\.weights must be an object"),
    ],
)
def test_formats_that_are_not_supported_are_named(
    weights: dict[str, Any] | None, reason: str, folder: Path
) -> None:
    group = COMPRESSED["config_groups"]["group_0"]
    group = group | {"weights": None if weights is None else group["weights"] | weights}
    change_config(folder, quantization_config=COMPRESSED | {"config_groups": {"group_0": group}})

    with pytest.raises(UnsupportedModel, match=reason):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"transform_config": {"config_groups": {"u": {}}}},
            r"\.transform_config is not supported",
        ),
        ({"another": [1]}, r"quantization_config\.another is not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "format sparse-24-bitmask: only d"),
        ({"sparsity_config": "dense"}, r"sparsity_config must be an object, not \"dense\""),
        ({"config_groups": [1]}, r"config_groups must be an object, not \[1\]"),
        ({"config_groups": {"g": 1}}, r"config_groups\.g must be an object, not 1"),
    ],
)
def test_settings_that_change_the_weights_are_named(
    settings: dict[str, Any], reason: str, folder: Path
) -> None:
    save_quantised_model("llama", folder, form="compressed-tensors")
    change_config(folder, quantization_config=COMPRESSED | settings)

    with pytest.raises(UnsupportedModel, match=reason):
        load_model(folder, device="cpu", dtype="float32")


def test_settings_that_do_not_change_the_weights_are_ignored(folder: Path) -> None:
    save_quantised_model("llama", folder, form="compressed-tensors")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    ignored = {
        "kv_cache_scheme": scheme,
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"},
        "transform_config": {},
        "version": "0.12.2",
    }
    change_config(folder, quantization_config=COMPRESSED | ignored)

    load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize("settings", ["fp8", [1], 8, False])
def test_a_quantization_config_that_is_no_object_is_named(settings: object, folder: Path) -> None:
    change_config(folder, quantization_config=settings)

    with pytest.raises(ModelLoadError, match="quantization_config must be an object, not "):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", r"json must be an object, not \[\]"),
        ("{", "json is not valid JSON: "),
        ("{}", "json: quantization must be an object, not null"),
        ('{"quantization": null}', "json: quantization must be an object, not null"),
        (
            '{"quantization": {"quant_algo": "FP8", "pre_quant_scale": true}}',
            r"json: quantization\.pre_quant_scale is not supported",
        ),
    ],
)
def test_an_invalid_file_of_modelopt_is_named(content: str, reason: str, folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text(content)

    with pytest.raises(UnsupportedModel, match=f"^hf_quant_config.{reason}"):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_weights_in_eight_bits_without_settings_are_named(kind: str, folder: Path) -> None:
    store_quantised(folder, is_channelwise=True, kind=kind)
    for settings in ({}, {"quantization_config": None}):
        change_config(folder, **settings)

        with pytest.raises(
            UnsupportedModel, match=r"_proj\.weight \(.*8.* neither quantization_config in config"
        ):
            load_model(folder, device="cpu", dtype="float32")


def test_a_scale_without_settings_is_named(folder: Path) -> None:
    save_tensors(folder, load_tensors(folder) | {f"{DOWN}_scale": torch.ones(1)})

    with pytest.raises(UnsupportedModel, match=r"down_proj\.weight_scale .*neither"):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float8_e5m2, "weight is stored in float8_e5m2: "),
        (torch.uint8, "weight is stored in uint8: "),
        (torch.bfloat16, "weight_scale has no weight in 8 bits"),
    ],
)
def test_a_stored_format_that_is_not_read_is_named(
    form: str, dtype: torch.dtype, reason: str, folder: Path
) -> None:
    save_quantised_model("llama", folder, form=form)
    tensors = load_tensors(folder)
    save_tensors(folder, tensors | {DOWN: tensors[DOWN].float().to(dtype)})

    with pytest.raises(UnsupportedModel, match=rf"^{DOWN.removesuffix('weight')}{reason}"):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_an_invalid_scale_is_named(value: float, folder: Path) -> None:
    save_quantised_model("llama", folder, form="compressed-tensors")
    tensors = load_tensors(folder)
    tensors[f"{DOWN}_scale"][3] = value
    save_tensors(folder, tensors)

    with pytest.raises(ModelLoadError, match=rf"{DOWN}_scale has scales that are not finite and"):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
        {"quant_method": "foo"},
        {"load_in_8bit": True},
    ],
    ids=lambda settings: str(settings.get("quant_method")),
)
def test_another_method_is_rejected_by_its_name(settings: dict[str, Any], folder: Path) -> None:
    change_config(folder, quantization_config=settings)

    named = f"quant_method {settings.get('quant_method')}: compressed-tensors and modelopt alone"
    with pytest.raises(UnsupportedModel, match=named):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weight_zero_point", "zero points are not read"),
        ("pre_quant_scale", "scales of inputs are not read"),
    ],
)
def test_other_tensors_of_a_quantised_weight_are_rejected(
    name: str, reason: str, folder: Path
) -> None:
    store_quantised(folder, is_channelwise=True)
    tensors = load_tensors(folder)
    other = f"model.layers.0.self_attn.q_proj.{name}"
    save_tensors(folder, tensors | {other: torch.zeros(64, 1, dtype=torch.int8)})
    change_config(folder, quantization_config=COMPRESSED)

    with pytest.raises(UnsupportedModel, match=f"{name}: {reason}"):
        load_model(folder, device="cpu", dtype="float32")


def test_another_algorithm_of_modelopt_is_rejected(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')

    with pytest.raises(UnsupportedModel, match="NVFP4"):
        load_model(folder, device="cpu", dtype="float32")


def test_a_weight_without_its_scale_is_named(folder: Path) -> None:
    store_quantised(folder, is_channelwise=True)
    tensors = load_tensors(folder)
    del tensors["model.layers.0.self_attn.q_proj.weight_scale"]
    save_tensors(folder, tensors)
    change_config(folder, quantization_config=COMPRESSED)

    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.q_proj\.weight_scale"):
        load_model(folder, device="cpu", dtype="float32")
