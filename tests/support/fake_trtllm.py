"""Puts the TensorRT-LLM stand-in (tests/fakes) on the import path, and removes it afterwards.

Child processes find it through their environment.
"""

import importlib
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAKES = Path(__file__).resolve().parents[1] / "fakes"
PACKAGE = "tensorrt_llm"


@contextmanager
def fake_trtllm_on_path() -> Generator[None]:
    """Make `import tensorrt_llm` find the stand-in inside the block; afterwards remove it and its
    imported modules.
    """
    sys.path.insert(0, str(FAKES))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(FAKES))
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        importlib.invalidate_caches()


def child_environment(**settings: Any) -> dict[str, str]:
    """Return the environment of a child that finds the stand-in with these engine settings."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (str(FAKES), inherited) if part)
    return {**os.environ, "PYTHONPATH": path, "TLLM_FAKE_CONTROL": json.dumps(settings)}
