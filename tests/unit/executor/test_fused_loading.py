"""The construction of the fused step: failures, the memory that is reserved, and 8-bit
checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cuda.fused_loading import build_fused
from penstock.executor.torch.loading import load_model
from penstock.executor.torch.module_tree import NotFused
from penstock.executor.torch.trial_reference import TrialReference
from support.quantised_folders import save_quantised_model
from support.torch_models import save_tiny_model
from unit.executor.host_queue import HostQueue
from unit.executor.triton_device import IS_INTERPRETED

CUDA = "penstock.executor.torch.cuda"


@pytest.fixture(autouse=True)
def has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


def build_failing(
    part: str,
    error: Exception,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: str = "bfloat16",
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    config = ExecutorConfig(
        model_path=save_tiny_model("llama", folder), device="cuda:1", dtype=dtype, num_blocks=8
    )
    model = load_model(folder, device="cpu", dtype=dtype)
    monkeypatch.setattr(part, fail)
    build_fused(config, model, HostQueue())


@pytest.mark.parametrize(
    "part",
    [
        "penstock.executor.torch.structure_check._StructureCheck.compare_logits",
        "penstock.executor.torch.trial_reference.module_logits",
        f"{CUDA}.fused_loading.fuse_weights",
        f"{CUDA}.fused_loading.make_rotary_table",
        f"{CUDA}.fused_loading.KVPages",
        f"{CUDA}.fused_loading.trial_logits",
    ],
)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("float32", "dtype bfloat16, a device"), ("bfloat16", "a device")],
)
def test_a_lack_of_memory_next_to_the_weights_names_the_settings(
    part: str, dtype: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        ValueError,
        match=f"more memory than cuda:1 has free: set {settings} .*: CUDA out of memory$",
    ):
        build_failing(part, error, tmp_path, monkeypatch, dtype=dtype)


def test_a_kernel_that_does_not_run_leaves_the_model_to_the_eager_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = f"{CUDA}.fused_loading.trial_logits"

    with pytest.raises(NotFused, match=r"^its kernels do not run here: no compiler$"):
        build_failing(part, RuntimeError("no compiler"), tmp_path, monkeypatch)


def test_pages_leave_room_for_the_largest_step_and_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []

    def num_device_blocks(_config: ExecutorConfig, *, step_bytes: int, **_: int) -> int:
        reserved.append(step_bytes)
        raise _CheckedError

    loading = f"{CUDA}.fused_loading"
    monkeypatch.setattr(f"{loading}._run_trial", lambda *_: (torch.zeros(1), None))
    monkeypatch.setattr(TrialReference, "fault_of", lambda *_: "")
    monkeypatch.setattr(TrialReference, "error_of", lambda *_: 0.0)
    monkeypatch.setattr(f"{loading}.run_widest_step", lambda *_, **__: None)
    monkeypatch.setattr(f"{loading}.num_device_blocks", num_device_blocks)
    monkeypatch.setattr(HostQueue, "peak_bytes", lambda *_: 1000)
    folder = save_tiny_model("llama", tmp_path)
    model = load_model(folder, device="cpu", dtype="float32")
    config = ExecutorConfig(
        model_path=folder, device="cuda", max_num_seqs=6, max_num_batched_tokens=60
    )

    with pytest.raises(_CheckedError):
        build_fused(config, model, HostQueue())

    logits = 6 * model.vocab_size * 4
    assert reserved == [1000 + 100 + logits]


class _CheckedError(Exception):
    """Raised to stop the construction of the fused step after both comparisons of logits."""


@pytest.mark.skipif(
    not IS_INTERPRETED, reason="the kernels read the host's memory only when interpreted"
)
def test_a_checkpoint_in_eight_bits_passes_both_comparisons_without_another_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint has one scale per tensor. Quantising it again, with one scale per channel,
    would change the weights.
    """
    folder = save_quantised_model(
        "llama", tmp_path, form="modelopt", kind="int8", num_hidden_layers=1
    )
    model = load_model(folder, device="cpu", dtype="float32", keeps_eight_bit=True)
    config = ExecutorConfig(
        model_path=folder, device="cuda", dtype="float32", quantization="int8", num_blocks=8
    )

    def stop(*_: object, **__: object) -> None:
        raise _CheckedError

    monkeypatch.setattr(f"{CUDA}.fused_loading.DeviceSampler", stop)
    caplog.set_level("DEBUG")

    with pytest.raises(_CheckedError):
        build_fused(config, model, HostQueue())

    (reported,) = [
        record.getMessage() for record in caplog.records if "in 8 bits" in record.message
    ]
    assert float(reported.split()[-1]) < 1e-4
