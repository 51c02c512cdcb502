"""The stand-in is there where a test asks for it and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest

from support.fake_trtllm import (
    FAKES,
    FakeEngines,
    child_environment,
    fake_trtllm_on_path,
)
from support.fake_trtllm import fake_engines as fake_engines  # fixtures
from support.fake_trtllm import fake_trtllm as fake_trtllm

PROGRAM = """
import json, tensorrt_llm
from tensorrt_llm import fake_control
print(json.dumps([tensorrt_llm.__file__, fake_control.settings_of_new_engine().num_blocks]))
"""


def is_there() -> bool:
    return importlib.util.find_spec("tensorrt_llm") is not None


def test_it_comes_and_goes() -> None:
    was_there = is_there()
    with fake_trtllm_on_path():
        module = importlib.import_module("tensorrt_llm")
        assert str(FAKES) in str(module.__file__)
        importlib.import_module("tensorrt_llm.fake_control").configure(num_blocks=3)
    assert is_there() == was_there
    assert not any(name.startswith("tensorrt_llm") for name in sys.modules)
    assert str(FAKES) not in sys.path

    with fake_trtllm_on_path():
        control = importlib.import_module("tensorrt_llm.fake_control")
        assert control.settings_of_new_engine().num_blocks == 1024


def test_children_find_it_with_their_settings() -> None:
    environment = child_environment(num_blocks=5)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
    )

    path, num_blocks = json.loads(done.stdout)
    assert path.startswith(str(FAKES))
    assert num_blocks == 5


def test_a_setting_that_does_not_exist_is_refused(
    fake_engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError):
        fake_engines.build(settings={"num_pages": 5})
    monkeypatch.setenv("TLLM_FAKE_CONTROL", '{"num_pages": 5}')
    with pytest.raises(TypeError):
        fake_engines.build()
