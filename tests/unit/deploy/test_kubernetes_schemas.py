"""Every manifest that kustomize makes is one that Kubernetes takes, in old and new releases."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import yaml

from support.custom_resources import SCHEMAS
from support.kubernetes import COMPONENTS, FOLDER, OVERLAYS, every_build

OLDEST = "1.30"
"""As base/kustomization.yaml says: preStop sleeps from there on."""


@pytest.fixture(scope="module")
def builds() -> dict[str, list[dict[str, Any]]]:
    return every_build()


@pytest.fixture(scope="module")
def validator() -> Any:
    """Kubernetes' own schemas, as a package brings them along."""
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    return importlib.import_module("kubernetes_validate")


def test_every_resource_fits_its_schema(
    builds: dict[str, list[dict[str, Any]]], validator: Any
) -> None:
    newest = validator.latest_version()
    num_checked = 0
    for name, manifests in builds.items():
        for manifest in manifests:
            if (manifest["apiVersion"], manifest["kind"]) in SCHEMAS:
                continue
            for version in (OLDEST, newest):
                try:
                    validator.validate(manifest, version, strict=True)
                except validator.ValidationError as error:
                    pytest.fail(f"{name} {manifest['kind']} {version}: {error.message}")
                num_checked += 1
    assert num_checked > 2 * 8 * len(builds) - 1


def test_the_check_would_notice(builds: dict[str, list[dict[str, Any]]], validator: Any) -> None:
    (deployment,) = [item for item in builds["base"] if item["kind"] == "Deployment"]
    wrong = yaml.safe_load(yaml.safe_dump(deployment))
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 150
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, OLDEST, strict=True)


def test_resources_of_others_fit_what_is_known_of_them(
    builds: dict[str, list[dict[str, Any]]],
) -> None:
    jsonschema: Any = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    seen: set[tuple[str, str]] = set()
    for manifests in builds.values():
        for manifest in manifests:
            key = manifest["apiVersion"], manifest["kind"]
            if key in SCHEMAS:
                jsonschema.validate(manifest, SCHEMAS[key])
                seen.add(key)
    assert seen == set(SCHEMAS)


def test_every_folder_is_built_and_every_file_is_used(
    builds: dict[str, list[dict[str, Any]]],
) -> None:
    assert set(builds) == {
        "base",
        *(f"overlays/{name}" for name in OVERLAYS),
        *(f"components/{name}" for name in COMPONENTS),
    }
    for path in FOLDER.rglob("kustomization.yaml"):
        said = path.read_text(encoding="utf-8")
        for sibling in path.parent.iterdir():
            if sibling != path:
                assert sibling.name in said, f"nothing uses {sibling}"
