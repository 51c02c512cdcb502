"""Loading a model onto its device, and the log lines about it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from penstock.executor.torch.errors import ModelLoadError
from penstock.executor.torch.loading import move_module, select_device

GIB = 1 << 30
META = torch.device("meta")


def layers(count: int) -> nn.Module:
    """Return layers of a GiB each by shape, without memory behind them."""
    row = torch.empty(1, dtype=torch.uint8).expand(GIB)
    parts = [nn.ParameterList([nn.Parameter(row, requires_grad=False)]) for _ in range(count)]
    return nn.ModuleList(parts)


def test_everything_moves_and_the_log_shows_how_far(caplog: pytest.LogCaptureFixture) -> None:
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


def test_what_is_there_already_is_not_moved(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    move_module(nn.Linear(2, 2), torch.device("cpu"))

    assert not caplog.records


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(ModelLoadError, match="cuda:1 does not exist: PyTorch finds 1 CUDA device"):
        select_device("cuda:1")
