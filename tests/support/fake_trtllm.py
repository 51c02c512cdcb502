"""Puts the TensorRT-LLM stand-in on the path for one test, and removes it afterwards.

Owns putting it there and taking it away; children get it through their environment.
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
    """`import tensorrt_llm` finds the stand-in inside, and nothing of it is left behind."""
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
    """Import this into a test module, or name it in `pytest.mark.usefixtures`."""
    with fake_trtllm_on_path():
        yield


async def tokens_of(result: RequestOutput) -> list[int]:
    """All tokens of a request, at its end."""
    async for _ in result:
        pass
    return list(result.outputs[0].token_ids)


class FakeEngines:
    """Engines of the stand-in over one small model; `close` shuts down what was built."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_model_folder(folder)
        self._built: list[LLM] = []

    def build(self, *, settings: dict[str, Any] | None = None, **arguments: Any) -> LLM:
        """An engine with these settings of the stand-in and these arguments; stepped by hand.

        Pages hold 4 tokens, and tokens go in and out as ids.
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
        """Of the engine built last."""
        from tensorrt_llm import fake_control

        return fake_control.engine()

    def params(self, **changes: Any) -> SamplingParams:
        """Greedy, 8 tokens, no end but that."""
        from tensorrt_llm import SamplingParams

        plain = {"end_id": 2, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
        return SamplingParams(**{"temperature": 0.0, **plain, **changes})

    def close(self) -> None:
        """Shut everything down."""
        for llm in self._built:
            self.control.release()
            llm.shutdown()


@pytest.fixture
def fake_engines(fake_trtllm: None, tmp_path: Path) -> Iterator[FakeEngines]:
    """Engines for one test; import `fake_trtllm` along with it."""
    engines = FakeEngines(tmp_path / "model")
    yield engines
    engines.close()


def child_environment(**settings: Any) -> dict[str, str]:
    """The environment of a child that finds the stand-in, whose engines have these settings."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (str(FAKES), inherited) if part)
    return {**os.environ, "PYTHONPATH": path, "TLLM_FAKE_CONTROL": json.dumps(settings)}


def write_model_folder(
    folder: Path, *, vocab_size: int = 128, max_seq_len: int = 256, eos_token_id: int = 2
) -> Path:
    """A folder that the stand-in takes for a model: a configuration and no weights."""
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
