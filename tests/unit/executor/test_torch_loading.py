"""Which model folders are served and which are rejected, and how a model is moved to a device."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.executor.torch.architecture import read_architecture
from penstock.executor.torch.attention_interface import reject_unknown
from penstock.executor.torch.errors import ModelLoadError, UnsupportedModel
from penstock.executor.torch.kv_pages import HeadShape
from penstock.executor.torch.load_probe import probe_model
from penstock.executor.torch.loading import load_model, move_module, select_device
from support.torch_models import ARCHITECTURES, save_tiny_model

SANE = {"model_type": "tiny", "max_position_embeddings": 512, "num_hidden_layers": 2}


def load(path: Path) -> Any:
    return load_model(path, device="cpu", dtype="auto")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model")


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_probe_finds_what_each_layer_keeps(folder: Path) -> None:
    model = load(folder)

    assert model.shapes == (HeadShape(num_heads=2, head_dim=16),) * 2
    assert model.vocab_size == 256
    assert model.dtype == torch.float32


def test_dtype_can_be_chosen(folder: Path) -> None:
    assert load_model(folder, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_weights_that_are_not_finite_are_reported(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match="llama: logits of a test step are not finite"):
        load(folder)


def test_a_folder_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()

    with pytest.raises(ModelLoadError, match="safetensors"):
        load(folder)


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    edit_config(folder, model_type="nobody_knows_this", architectures=["Nobody"])

    with pytest.raises(ModelLoadError, match="nobody_knows_this") as rejection:
        load(folder)
    assert "pip install" not in str(rejection.value)


def test_broken_weights_are_named(folder: Path) -> None:
    next(folder.glob("*.safetensors")).write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 not json")

    with pytest.raises(ModelLoadError):
        load(folder)


def test_missing_weights_are_named(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})

    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj"):
        load(folder)


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=80)

    with pytest.raises(ModelLoadError, match="up_proj"):
        load(folder)


def test_an_absent_device_is_named(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ModelLoadError, match="CUDA"):
        load_model(folder, device="cuda", dtype="auto")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layer_types", ["full_attention", "chunked_attention"], "chunked_attention"),
        ("layer_types", ["linear_attention", "full_attention"], "linear_attention"),
        ("is_encoder_decoder", True, "decoder-only"),
        ("use_bidirectional_attention", True, "both directions"),
        ("num_kv_shared_layers", 2, "between layers"),
        ("max_position_embeddings", None, "max_position_embeddings"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "whole batch"),
        ("rope_parameters", {"full_attention": {"rope_type": "dynamic"}}, "whole batch"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "whole batch"),
    ],
)
def test_a_configuration_that_paging_would_get_wrong_is_rejected(
    field: str, value: object, words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read_architecture(SimpleNamespace(**{**SANE, field: value}))


def test_longrope_is_served_up_to_its_original_length() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    config = SimpleNamespace(**SANE, rope_parameters=rope)

    assert read_architecture(config).max_seq_len == 128
    assert read_architecture(SimpleNamespace(**SANE)).max_seq_len == 512


def test_a_layer_that_hides_its_window_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model("mistral_window", tmp_path)
    edit_config(folder, sliding_window=None, layer_types=["full_attention", "sliding_attention"])

    with pytest.raises(UnsupportedModel, match="window"):
        load(folder)


def test_unknown_attention_arguments_are_rejected_unless_they_ask_for_nothing() -> None:
    reject_unknown("Attention", {"position_ids": object(), "use_cache": False, "strange": None})

    with pytest.raises(UnsupportedModel, match="strange"):
        reject_unknown("Attention", {"position_ids": object(), "strange": 1})


def test_layers_that_bypass_the_interface_are_rejected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPTNeoXJapaneseConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_multiple_size=2,
        max_position_embeddings=64,
    )
    transformers.GPTNeoXJapaneseForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match=r"gpt_neox_japanese: layers \[0, 1\] bypass"):
        load(tmp_path)


def test_a_test_step_that_raises_names_type_and_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> object:
        raise IndexError("no such row")

    monkeypatch.setattr(transformers.LlamaModel, "forward", fail)

    with pytest.raises(ModelLoadError, match=r"of llama raised|llama: IndexError: no such row"):
        load(folder)


Leak = Callable[[Tensor, Tensor], Tensor]


def shift_tokens(hidden: Tensor, _positions: Tensor) -> Tensor:
    """Add the hidden state of the previous token, as a convolution or a token shift does."""
    return hidden + hidden.roll(1, dims=1)


def count_places(hidden: Tensor, _positions: Tensor) -> Tensor:
    """Add a number that depends on the token's index in the input, as in a model that ignores
    `positions`.
    """
    return hidden + torch.arange(hidden.shape[1])[None, :, None] / 10


def scale_by_longest(hidden: Tensor, positions: Tensor) -> Tensor:
    """Scale by the largest position in the input, as dynamic rotary embeddings do. A long sequence
    then changes all others.
    """
    return hidden * (1 + positions.max() / 100)


def bound_experts(hidden: Tensor, _positions: Tensor) -> Tensor:
    """Set the hidden states of all tokens after the first 20 of the input to zero, as experts with
    a limited capacity do.
    """
    kept = torch.arange(hidden.shape[1])[None, :, None] < 20
    return hidden * kept


def restart_in_chunks(hidden: Tensor, positions: Tensor) -> Tensor:
    """Change tokens of later chunks, as a recurrent state that is reset at each chunk does."""
    first = torch.arange(hidden.shape[1])[None] - positions
    is_cut = (first[..., None] < 0) & (positions[..., None] < 20)
    return hidden + is_cut


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (shift_tokens, "packed with"),
        (count_places, "packed with"),
        (scale_by_longest, "packed with"),
        (bound_experts, "packed with"),
        (restart_in_chunks, "split into chunks"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_tokens_depend_on_their_neighbours_is_rejected(
    leak: Leak, words: str, dtype: str, folder: Path
) -> None:
    model = load_model(folder, device="cpu", dtype=dtype)
    probe_model(model.module, model.architecture, model.dtype)
    inner: Any = model.module.get_submodule("model")

    def before(_module: object, args: object, kwargs: dict[str, Any]) -> tuple[object, Any]:
        positions = kwargs["position_ids"]
        if positions is None:
            positions = torch.arange(kwargs["input_ids"].shape[1])[None]
        embeds = inner.embed_tokens(kwargs["input_ids"])
        embeds = leak(embeds, positions).to(embeds.dtype)
        return args, {**kwargs, "input_ids": None, "inputs_embeds": embeds}

    inner.register_forward_pre_hook(before, with_kwargs=True)

    with pytest.raises(UnsupportedModel, match=f"llama.*{words}"):
        probe_model(model.module, model.architecture, model.dtype)


def test_positions_that_begin_elsewhere_are_rejected(folder: Path) -> None:
    model = load(folder)
    inner: Any = model.module.get_submodule("model")

    def before(_module: object, args: object, kwargs: dict[str, Any]) -> tuple[object, Any]:
        if kwargs["position_ids"] is None:
            kwargs["position_ids"] = torch.arange(kwargs["input_ids"].shape[1])[None] * 2
        return args, kwargs

    inner.register_forward_pre_hook(before, with_kwargs=True)

    with pytest.raises(UnsupportedModel, match="llama does not count positions from 0"):
        probe_model(model.module, model.architecture, model.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sound_models_pass_in_every_precision(name: str, dtype: str, tmp_path: Path) -> None:
    load_model(save_tiny_model(name, tmp_path), device="cpu", dtype=dtype)


def test_a_window_that_no_layer_asks_for_bounds_the_length() -> None:
    hidden = SimpleNamespace(**SANE, sliding_window=64)
    unused = SimpleNamespace(**SANE, sliding_window=64, use_sliding_window=False)
    layered = SimpleNamespace(**SANE, sliding_window=64, layer_types=["full_attention"] * 2)

    assert read_architecture(hidden).undeclared_window == 64
    assert read_architecture(unused).undeclared_window == 0
    assert read_architecture(layered).undeclared_window == 0


GIB = 1 << 30
META = torch.device("meta")


def layers(count: int) -> nn.Module:
    """Return `count` layers with 1 GiB of weights each. All weights share one byte of memory."""
    row = torch.empty(1, dtype=torch.uint8).expand(GIB)
    parts = [nn.ParameterList([nn.Parameter(row, requires_grad=False)]) for _ in range(count)]
    return nn.ModuleList(parts)


def test_everything_moves_and_the_log_shows_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    module = layers(4)
    seconds = itertools.count()

    move_module(module, META, clock=lambda: next(seconds))

    assert {parameter.device for parameter in module.parameters()} == {META}
    assert [record.getMessage() for record in caplog.records] == [
        "loading onto meta: 2.0 of 4.0 GiB",
        "loading onto meta: 4.0 of 4.0 GiB",
        "loading onto meta: 4.0 GiB in 5.0 s",
    ]


@pytest.mark.parametrize(
    ("stored", "dtype", "settings"),
    [
        ("float32", "auto", "dtype bfloat16, a device"),
        ("bfloat16", "float32", "dtype bfloat16, a device"),
        ("bfloat16", "auto", "a device"),
        ("float32", "bfloat16", "a device"),
    ],
)
def test_too_little_memory_for_the_weights_names_what_to_change(
    stored: str, dtype: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("llama", tmp_path, getattr(torch, stored))

    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("penstock.executor.torch.loading.move_module", too_large)
    with pytest.raises(ModelLoadError, match=f"than cpu has free: set {settings} with more free"):
        load_model(tmp_path, device="cpu", dtype=dtype)


def test_a_module_on_the_device_is_not_moved(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    move_module(nn.Linear(2, 2), torch.device("cpu"))

    assert not caplog.records


def test_a_cuda_device_that_is_not_there_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(ModelLoadError, match="cuda:1 does not exist: PyTorch finds 1 CUDA device"):
        select_device("cuda:1")
