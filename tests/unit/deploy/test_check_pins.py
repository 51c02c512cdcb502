"""The build step detects every change of the packages in the vendor's base image."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy" / "trtllm" / "check_pins.py"
NO_PROBLEMS = "No broken requirements found.\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_pins", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_pins = load()

IMAGE = {
    "torch": "2.10.0a0+b4e4ee81d3.nv25.12",
    "transformers": "4.57.3",
    "protobuf": "6.33.2",
    "grpcio": "1.62.3",
    "python-apt": "2.7.7+ubuntu5.2",
    "command-not-found": "0.3",
    "distro-info": "1.7+build1~x",
}


def test_everything_is_constrained_but_grpc_and_what_pip_cannot_name() -> None:
    assert check_pins.constraints(IMAGE) == {
        name: IMAGE[name]
        for name in ("torch", "transformers", "protobuf", "python-apt", "command-not-found")
    }


@pytest.mark.parametrize(
    ("after", "change"),
    [
        (IMAGE | {"protobuf": "7.36.2"}, "protobuf 6.33.2 became 7.36.2"),
        (IMAGE | {"torch": "2.13.0"}, "torch 2.10.0a0+b4e4ee81d3.nv25.12 became 2.13.0"),
        (IMAGE | {"distro-info": "1.8"}, "distro-info 1.7+build1~x became 1.8"),
        (IMAGE | {"grpcio": "1.9.0"}, "grpcio 1.62.3 sank to 1.9.0"),
        ({k: v for k, v in IMAGE.items() if k != "torch"}, f"torch {IMAGE['torch']} is gone"),
        ({k: v for k, v in IMAGE.items() if k != "grpcio"}, "grpcio 1.62.3 is gone"),
    ],
)
def test_every_other_change_is_reported(after: dict[str, str], change: str) -> None:
    assert check_pins.changes(IMAGE, after) == [change]


def test_only_new_problems_are_reported() -> None:
    old = "opencv 4.9 requires numpy<2, but you have numpy 2.1.3."
    new = "onnx 1.18.0 requires protobuf<6, but you have protobuf 6.33.2."

    assert check_pins.new_problems([old, ""], [new, old]) == [new]
    assert check_pins.new_problems([NO_PROBLEMS], [new]) == [new]
    assert check_pins.new_problems([old], [NO_PROBLEMS]) == []


def run(*arguments: str, may_rise: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"MAY_RISE": may_rise},
        timeout=60,
    )


def write_pins(folder: Path, after: dict[str, str]) -> None:
    for name, versions in (("before", IMAGE), ("after", after)):
        (folder / f"{name}.txt").write_text("\n".join(check_pins.written(versions)) + "\n")
        (folder / f"problems-{name}.txt").write_text(NO_PROBLEMS)


def test_compare_fails_the_build_by_its_exit_code(tmp_path: Path) -> None:
    write_pins(tmp_path, IMAGE | {"protobuf": "7.36.2"})

    rejected = run("compare", str(tmp_path))

    assert rejected.returncode == 1
    assert rejected.stderr == (
        "the install changed what the image brings: protobuf 6.33.2 became 7.36.2\n"
    )


def test_compare_counts_problems(tmp_path: Path) -> None:
    write_pins(tmp_path, IMAGE)
    assert run("compare", str(tmp_path)).returncode == 0

    (tmp_path / "problems-after.txt").write_text("penstock 0.1.0 requires uvloop\n")

    assert run("compare", str(tmp_path)).returncode == 1


def test_the_environment_names_what_else_may_rise(tmp_path: Path) -> None:
    write_pins(tmp_path, IMAGE | {"protobuf": "7.36.2"})

    assert run("compare", str(tmp_path), may_rise="Protobuf onnx").returncode == 0
    constrained = run("constraints", str(tmp_path / "before.txt"), may_rise="Protobuf").stdout
    assert "protobuf" not in constrained
    assert "transformers==4.57.3" in constrained
