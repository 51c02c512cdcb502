"""Old and new releases of Kubernetes accept every manifest that kustomize generates."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from support.kubernetes import COMPONENTS, FOLDER, OVERLAYS, every_build

OLDEST = "1.30"
"""As in base/kustomization.yaml: the first release with a preStop sleep."""
OF_OTHERS = {"monitoring.coreos.com/v1", "inference.networking.k8s.io/v1"}
"""Resources without a schema in Kubernetes."""


@pytest.fixture(scope="module")
def builds() -> dict[str, list[dict[str, Any]]]:
    return every_build()


@pytest.fixture(scope="module")
def validator() -> Any:
    """Provide the module kubernetes_validate, which contains Kubernetes' schemas."""
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    return importlib.import_module("kubernetes_validate")


def test_every_resource_fits_its_schema(
    builds: dict[str, list[dict[str, Any]]], validator: Any
) -> None:
    # Most manifests occur in several builds.
    distinct = {
        json.dumps(manifest): f"{name} {manifest['kind']}"
        for name, manifests in builds.items()
        for manifest in manifests
        if manifest["apiVersion"] not in OF_OTHERS
    }
    assert len(distinct) > len(builds)
    for text, name in distinct.items():
        for version in (OLDEST, validator.latest_version()):
            try:
                validator.validate(json.loads(text), version, strict=True)
            except validator.ValidationError as error:
                pytest.fail(f"{name} {version}: {error.message}")


def test_every_folder_is_built_and_every_file_is_used(
    builds: dict[str, list[dict[str, Any]]],
) -> None:
    assert set(builds) == {
        "base",
        *(f"overlays/{name}" for name in OVERLAYS),
        *(f"components/{name}" for name in COMPONENTS),
    }
    for path in FOLDER.rglob("kustomization.yaml"):
        content = path.read_text(encoding="utf-8")
        for sibling in path.parent.iterdir():
            if sibling != path:
                assert sibling.name in content, f"nothing uses {sibling}"
