"""Every benchmark prints its usage, or the missing package, before it does anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HELPER = ROOT / "tests/support/benchmark_help.py"
PROGRAMS = sorted(
    file.name
    for file in (ROOT / "benchmarks").glob("*.py")
    if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8")
)
LACKING = {
    "cpu_served.py": "torch is not installed: install penstock[torch]",
    "cpu_attention.py": "torch is not installed: install penstock[torch]",
    "cpu_step.py": "torch is not installed: install penstock[torch]",
    "engine_cpu.py": "torch is not installed: install penstock[torch]",
    "gpu.py": "torch is not installed: install penstock[torch]",
    "slow_pictures.py": "rich is not installed: install penstock[top]",
}
"""The message in place of a usage where a required package is missing."""
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str]]:
    """Return exit code and output of each, all from one process without optional packages."""
    folder = ROOT / "benchmarks"
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    answer = subprocess.run(
        (sys.executable, HELPER, *(str(folder / name) for name in PROGRAMS)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return {Path(file).name: (code, said) for file, code, said in json.loads(answer.stdout)}


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(LACKING)))
def test_a_benchmark_says_how_it_is_run(name: str, helps: dict[str, tuple[int, str]]) -> None:
    code, said = helps[name]
    assert code == 0, said
    first_line = (ROOT / "benchmarks" / name).read_text("utf-8").split("\n", 1)[0].strip('"')
    assert said.startswith(f"usage: {name}") or first_line in said or name in said, said


@pytest.mark.parametrize("name", sorted(LACKING))
def test_a_benchmark_that_lacks_a_package_says_which(
    name: str, helps: dict[str, tuple[int, str]]
) -> None:
    assert helps[name] == (1, LACKING[name])


def test_a_side_that_is_given_too_little_tells_its_usage() -> None:
    side = ROOT / "benchmarks/delivery_peers.py"
    answer = subprocess.run((sys.executable, side, "aio"), capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr.startswith("The processes that Penstock's delivery is compared with")
