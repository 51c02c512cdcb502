"""The commands of docs/tensorrt-llm.md that require neither a GPU nor a container."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for body in re.findall(r"^```sh test\n(.*?)^```$", TEXT, re.M | re.S)
    for line in body.splitlines()
]


def test_the_page_has_a_command_that_verifies() -> None:
    assert any(command.startswith("penstock verify --serve") for command in COMMANDS)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_succeeds(command: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )

    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.stdout
