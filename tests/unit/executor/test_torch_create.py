"""Which device the torch executor uses, and which GPU index its messages contain."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch import create
from penstock.executor.torch.create import create_torch_executor
from penstock.executor.torch.errors import ModelLoadError


@pytest.mark.parametrize(
    ("device", "is_available", "is_reported"),
    [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)],
)
def test_a_gpu_that_is_not_used_is_reported(
    device: str,
    is_available: bool,
    is_reported: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_config: ExecutorConfig) -> None:
        raise ModelLoadError("no model")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(create, "load_configured", fail)

    with pytest.raises(ModelLoadError):
        create_torch_executor(ExecutorConfig(model_path=Path("/m"), device=device))

    expected = ["device is cpu, but a CUDA device is available"] if is_reported else []
    assert caplog.messages == expected


def test_messages_have_the_index_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(device=torch.device("cuda", 1))
    built: list[ExecutorConfig] = []
    monkeypatch.setattr(create, "load_configured", lambda _config: model)
    monkeypatch.setattr(create, "_fused_on_cuda", lambda config, _model: built.append(config))

    create_torch_executor(ExecutorConfig(model_path=Path("/m"), device="cuda"))

    assert built == [ExecutorConfig(model_path=Path("/m"), device="cuda:1")]
