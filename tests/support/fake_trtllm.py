"""Puts the TensorRT-LLM stand-in on the import path for one test, and removes it afterwards.

Child processes get it through their environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.fake_control import EngineControl
    from tensorrt_llm.llmapi import RequestOutput

FAKES = Path(__file__).resolve().parents[1] / "fakes"
PACKAGE = "tensorrt_llm"


def _loaded() -> list[str]:
    return [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]


@contextmanager
def fake_trtllm_on_path() -> Generator[None]:
    """Make `import tensorrt_llm` find the stand-in inside the block; remove all of it after."""
    sys.path.insert(0, str(FAKES))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        control = sys.modules.get(f"{PACKAGE}.fake_control")
        if control is not None:
            control.reset()
        sys.path.remove(str(FAKES))
        for name in _loaded():
            del sys.modules[name]
        importlib.invalidate_caches()


@pytest.fixture
def fake_trtllm() -> Iterator[None]:
    """The fixture: import it into a test module, or name it in `pytest.mark.usefixtures`."""
    with fake_trtllm_on_path():
        yield


async def tokens_of(result: RequestOutput) -> list[int]:
    """Return all tokens of a request at its end."""
    async for _ in result:
        pass
    return list(result.outputs[0].token_ids)


class FakeEngines:
    """Engines of the stand-in over one small model; `close` shuts down all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_model_folder(folder)
        self._built: list[LLM] = []

    def build(self, *, settings: dict[str, Any] | None = None, **arguments: Any) -> LLM:
        """Build an engine with these stand-in settings and arguments; the test steps it.

        Pages hold 4 tokens; input and output are token ids.
        """
        from tensorrt_llm import LLM, fake_control
        from tensorrt_llm.llmapi import KvCacheConfig

        fake_control.configure(**{"is_paused": True, "stats_lag_s": 0.0, **(settings or {})})
        arguments = {
            "skip_tokenizer_init": True,
            "enable_iter_perf_stats": True,
            "kv_cache_config": KvCacheConfig(tokens_per_block=4),
            **arguments,
        }
        llm = LLM(self.folder, **arguments)
        self._built.append(llm)
        return llm

    @property
    def control(self) -> EngineControl:
        """Return the control of the last engine built."""
        from tensorrt_llm import fake_control

        return fake_control.engine()

    def params(self, **changes: Any) -> SamplingParams:
        """Return parameters for greedy sampling of 8 tokens with no other end."""
        from tensorrt_llm import SamplingParams

        plain = {"end_id": 2, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
        return SamplingParams(**{"temperature": 0.0, **plain, **changes})

    def close(self) -> None:
        for llm in self._built:
            self.control.release()
            llm.shutdown()


@pytest.fixture
def fake_engines(fake_trtllm: None, tmp_path: Path) -> Iterator[FakeEngines]:
    """Provide engines for one test; import `fake_trtllm` with it."""
    engines = FakeEngines(tmp_path / "model")
    yield engines
    engines.close()


def child_environment(**settings: Any) -> dict[str, str]:
    """Return the environment of a child that finds the stand-in with these engine settings."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (str(FAKES), inherited) if part)
    return {**os.environ, "PYTHONPATH": path, "TLLM_FAKE_CONTROL": json.dumps(settings)}


def write_model_folder(
    folder: Path, *, vocab_size: int = 128, max_seq_len: int = 256, eos_token_id: int = 2
) -> Path:
    """Write a folder that the stand-in accepts as a model: a configuration, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "max_position_embeddings": max_seq_len,
        "eos_token_id": eos_token_id,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
