"""Builders that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.trtllm_house import TrtllmHouse


@pytest.fixture
def build(tmp_path: Path, fake_trtllm: None) -> Iterator[Callable[..., TrtllmHouse]]:
    """Makes engines of the TensorRT-LLM stand-in under our executor; see TrtllmHouse."""
    built: list[TrtllmHouse] = []

    def make(**settings: Any) -> TrtllmHouse:
        built.append(TrtllmHouse(tmp_path, **settings))
        return built[-1]

    yield make
    for house in built:
        house.close()
