"""Which build of torch an installation takes, depending on what pip's indexes offer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy" / "torch_requirement.sh"


def requirement(python: str, wheels: Path) -> str:
    """Return what the script prints if pip finds only the wheels of this folder."""
    settings = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(wheels)}
    return subprocess.run(
        [SCRIPT, python],
        env=os.environ | {f"PIP_{name}": value for name, value in settings.items()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (("2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.14.0"), "torch==2.13.0+cpu"),
        (("2.13.0+cpu",), "torch==2.13.0+cpu"),
        (("2.13.0", "2.13.0+cu130"), "torch==2.13.0"),
        (("2.13.0", "2.13.0+cpu.abi", "2.12.13.0+cpu", "2.14.0+cpu"), "torch==2.13.0"),
        ((), "torch==2.13.0"),
    ],
)
def test_the_cpu_build_is_taken_where_it_is_offered(
    tmp_path: Path, offered: tuple[str, ...], chosen: str
) -> None:
    for version in offered:
        (tmp_path / f"torch-{version}-py3-none-any.whl").touch()

    assert requirement(sys.executable, tmp_path) == f"{chosen}\n"


def test_without_pip_the_build_is_left_to_the_index(tmp_path: Path) -> None:
    assert requirement("/nonexistent", tmp_path) == "torch==2.13.0\n"
