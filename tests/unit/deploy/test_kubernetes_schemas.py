"""Every manifest that kustomize makes is one that Kubernetes takes, in old and new releases."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from support.kubernetes import COMPONENTS, FOLDER, OVERLAYS, every_build

OLDEST = "1.30"
"""As base/kustomization.yaml says: preStop sleeps from there on."""
OF_OTHERS = {"monitoring.coreos.com/v1", "inference.networking.k8s.io/v1"}
"""Resources that Kubernetes itself has no schema of."""


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
            if manifest["apiVersion"] in OF_OTHERS:
                continue
            for version in (OLDEST, newest):
                try:
                    validator.validate(manifest, version, strict=True)
                except validator.ValidationError as error:
                    pytest.fail(f"{name} {manifest['kind']} {version}: {error.message}")
                num_checked += 1
    assert num_checked > 2 * 8 * len(builds) - 1


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
