"""The examples of settings in docs/tensorrt-llm.md load, and so does the file that Compose mounts;
the commands of the container's files parse.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from penstock.executor.trtllm.config import TrtllmConfig
from penstock.server.settings.json_values import from_json_value
from penstock.tools.command_line import build_parser

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy" / "trtllm"
PAGE = REPOSITORY / "docs" / "tensorrt-llm.md"
TEXT = PAGE.read_text(encoding="utf-8")
FENCES = re.findall(r"^```([^\n]*)\n(.*?)^```$", TEXT, re.M | re.S)
EXAMPLES = [body for kind, body in FENCES if kind == "toml test"]


def load(text: str) -> TrtllmConfig:
    return from_json_value(TrtllmConfig, tomllib.loads(text), "trtllm.toml")


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_loads_and_sets_something(text: str) -> None:
    assert load(text) != TrtllmConfig()


def test_the_file_that_compose_mounts_loads_and_fits_its_gpus(tmp_path: Path) -> None:
    config = load((DEPLOY / "trtllm.toml").read_text(encoding="utf-8"))

    counts = re.findall(r"^ +count: (\d+)$", (DEPLOY / "compose.yaml").read_text("utf-8"), re.M)
    assert counts == [str(config.world_size)]


def test_commands_of_the_containers_files_parse() -> None:
    lines = (DEPLOY / "compose.yaml").read_text(encoding="utf-8").splitlines()
    start = lines.index("    command:") + 1
    arguments: list[str] = []
    for line in lines[start:]:
        if not line.startswith("      - "):
            break
        arguments.append(line.removeprefix("      - "))
    entry = re.findall(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text("utf-8"), re.M)[-1]

    for call in (arguments, ast.literal_eval(entry)):
        args, unknown = build_parser().parse_known_args(call)
        assert unknown == []
        assert args.executor == "trtllm"
        assert args.host == "0.0.0.0"
