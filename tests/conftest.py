"""Fixtures for all tests; builders and fakes are in tests/support."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from support.fake_trtllm import fake_trtllm_on_path

if TYPE_CHECKING:
    from penstock.server.text.model_text import ModelText

# Test processes share the cores: torch threads that wait for one another would make each test take
# many times as long. Services that tests start inherit this setting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU Triton interprets its kernels; it reads the variable when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `make nightly` selects a profile with more examples. No profile has a time limit.
hypothesis.settings.register_profile("default", deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=20_000)
hypothesis.settings.load_profile(os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def fake_trtllm() -> Iterator[None]:
    """Make `import tensorrt_llm` find the stand-in of tests/fakes while the test runs."""
    with fake_trtllm_on_path():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelText]:
    """Provide the tokenizer and the chat template of a small model."""
    # Imported on demand: many tests need neither the server nor its libraries.
    from support.fronts import make_text

    text = make_text(tmp_path_factory.mktemp("model"))
    yield text
    text.close()
