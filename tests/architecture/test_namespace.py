"""`penstock` is one namespace package over seven roots: none has an `__init__.py` in
`penstock/`.
"""

from __future__ import annotations

import importlib
import pathlib
import tomllib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PORTIONS = {
    "protos": ("conventions", "v1"),
    "scheduler": ("scheduler",),
    "executors": ("executor",),
    "server": ("server",),
    "clients": ("client",),
    "tools": ("tools",),
    "gateways": ("gateway",),
}


@pytest.mark.parametrize("root", PORTIONS)
def test_the_namespace_has_exactly_the_known_portions(root: str) -> None:
    entries = {
        entry.name
        for entry in (REPOSITORY / root / "penstock").iterdir()
        if entry.name != "__pycache__"
    }

    # An __init__.py here would hide the other roots.
    assert entries == set(PORTIONS[root])


@pytest.mark.parametrize(
    ("root", "portion"), [(root, portion) for root in PORTIONS for portion in PORTIONS[root]]
)
def test_portion_is_a_typed_package(root: str, portion: str) -> None:
    folder = REPOSITORY / root / "penstock" / portion

    assert (folder / "py.typed").is_file()
    assert (folder / "__init__.py").is_file()
    assert importlib.import_module(f"penstock.{portion}").__file__ == str(folder / "__init__.py")


@pytest.mark.parametrize("root", PORTIONS)
def test_every_folder_with_modules_is_a_package(root: str) -> None:
    folders = {path.parent for path in (REPOSITORY / root / "penstock").rglob("*.py")}

    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_test_folders_are_not_packages() -> None:
    found = (REPOSITORY / "tests").rglob("__init__.py")
    # A folder that replaces an installed package is itself a package.
    assert [path for path in found if REPOSITORY / "tests" / "fakes" not in path.parents] == []


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]

    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_root_is_built_and_checked() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    build = project["hatch"]["build"]

    assert set(build["dev-mode-dirs"]) == set(PORTIONS)
    assert set(build["targets"]["wheel"]["packages"]) == {f"{root}/penstock" for root in PORTIONS}
    assert set(PORTIONS) <= set(project["mypy"]["mypy_path"].split(":"))
    assert set(PORTIONS) <= set(project["pyright"]["include"])
