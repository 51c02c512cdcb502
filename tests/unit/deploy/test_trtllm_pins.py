"""Our requirements are compatible with the recorded package versions of the TensorRT-LLM images."""

import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy" / "trtllm"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One line of vendor-pins.txt."""

    name: str
    carried: str
    status: str
    source: str


def read_pins() -> list[Pin]:
    lines = (DEPLOY / "vendor-pins.txt").read_text(encoding="utf-8").splitlines()
    return [
        Pin(name=name, carried=carried, status=status, source=source)
        for line in lines
        if line and not line.startswith("#")
        for name, carried, status, source in [[part.strip() for part in line.split("|")]]
    ]


PINS = read_pins()
EXTRAS = ("server", "torch", "trtllm")
OURS = {
    canonicalize_name(requirement.name): requirement.specifier
    for group in (PROJECT["dependencies"], *map(PROJECT["optional-dependencies"].get, EXTRAS))
    for text in group
    for requirement in [Requirement(text)]
    if requirement.name != PROJECT["name"]
} | {"python": SpecifierSet(PROJECT["requires-python"])}


def share_a_version(ours: SpecifierSet, theirs: SpecifierSet) -> bool:
    """Return whether a version satisfies both. Only their bounds, and each bound with `.1`
    appended, are tried.
    """
    bounds = [Version(part.version) for part in [*ours, *theirs]]
    tried = [*bounds, *(Version(f"{bound.base_version}.1") for bound in bounds)]
    return any(
        ours.contains(version, prereleases=True) and theirs.contains(version, prereleases=True)
        for version in tried
    )


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: f"{pin.name} {pin.carried}")
def test_our_version_range_includes_that_of_the_image(pin: Pin) -> None:
    if pin.carried in ("any", "none") or pin.name not in OURS:
        return
    assert share_a_version(OURS[pin.name], SpecifierSet(pin.carried)), (
        f"pyproject.toml asks for {pin.name}{OURS[pin.name]}, the image carries {pin.carried}"
    )


def test_every_requirement_is_recorded() -> None:
    assert set(OURS) - {pin.name for pin in PINS} == set()


def test_the_same_version_is_in_every_file() -> None:
    recorded: defaultdict[str, list[str]] = defaultdict(list)
    for pin in PINS:
        recorded[pin.name].append(pin.carried)
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    page = (REPOSITORY / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")

    version = recorded["tensorrt-llm"][0].removeprefix("==")

    assert version.startswith("1.2.")
    assert re.findall(r"^ARG TRTLLM_VERSION=(.*)$", dockerfile, re.M) == [version]
    assert re.findall(r"TRTLLM_VERSION: (.*)$", compose, re.M) == [version]
    assert re.findall(r"image: penstock-trtllm:(.*)$", compose, re.M) == [version]
    assert set(re.findall(r"penstock-trtllm:([\d.]+\d)", page)) == {version}
