"""The manifests of deploy/kubernetes as a cluster would receive them.

Runs the kustomize that is built into kubectl and needs no cluster. Skips without a kubectl that
supports components.
"""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import DEPLOY

FOLDER = DEPLOY / "kubernetes"
OVERLAYS = tuple(sorted(path.name for path in (FOLDER / "overlays").iterdir()))
COMPONENTS = tuple(sorted(path.name for path in (FOLDER / "components").iterdir()))
Manifest = dict[str, Any]


@functools.cache
def _built(folder: Path) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "unknown field" in done.stderr and '"labels"' in done.stderr:
        pytest.skip("no kubectl with kustomize 4.1 or later, which knows `labels`")
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(*parts: str) -> list[Manifest]:
    """Return the manifests that `kubectl kustomize` builds in a folder of deploy/kubernetes."""
    return list(yaml.safe_load_all(_built(FOLDER.joinpath(*parts))))


def build_with(*components: str) -> list[Manifest]:
    # In a copy of the folder, because kustomize accepts only paths relative to the file.
    with tempfile.TemporaryDirectory(prefix="penstock-kustomize-") as folder:
        home = Path(folder)
        shutil.copytree(FOLDER, home / "kubernetes")
        overlay = home / "kubernetes" / "overlays" / "tried"
        overlay.mkdir()
        (overlay / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    "resources": ["../../base"],
                    "components": [f"../../components/{name}" for name in components],
                }
            )
        )
        return list(yaml.safe_load_all(_built(overlay)))


def every_build() -> dict[str, list[Manifest]]:
    builds = {"base": build("base")}
    builds |= {f"overlays/{name}": build("overlays", name) for name in OVERLAYS}
    # In a cluster the autoscaler requires the monitor, but its manifest builds without it.
    builds |= {f"components/{name}": build_with(name) for name in COMPONENTS}
    return builds


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def named_manifest(manifests: list[Manifest], kind: str, name: str = "penstock") -> Manifest:
    """Return the only object of this kind whose name is `name`, possibly with a hash suffix."""
    (found,) = [
        manifest
        for manifest in of_kind(manifests, kind)
        if manifest["metadata"]["name"] == name
        or manifest["metadata"]["name"].rpartition("-")[0] == name
    ]
    return found


def pod_of(manifests: list[Manifest]) -> Manifest:
    template: Manifest = named_manifest(manifests, "Deployment")["spec"]["template"]
    return template


def container_of(manifests: list[Manifest]) -> Manifest:
    (container,) = pod_of(manifests)["spec"]["containers"]
    found: Manifest = container
    return found


def settings_of(manifests: list[Manifest]) -> dict[str, str]:
    """Return the environment variables that the service's container gets from its ConfigMap."""
    (source,) = container_of(manifests)["envFrom"]
    name = source["configMapRef"]["name"]
    (config,) = [
        item for item in of_kind(manifests, "ConfigMap") if item["metadata"]["name"] == name
    ]
    data: dict[str, str] = config["data"]
    return data
