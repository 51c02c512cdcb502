"""The service started as in the manifests: by environment variables, on a read-only root.

It runs in a mount namespace in which only a pod's mounts are writable. Skips without the right to
create one.
"""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import Client, Unauthenticated
from support.kubernetes import build, container_of, named_manifest, settings_of
from support.service import simulated, started
from support.timeout import TEST_TIMEOUT_S

READ_ONLY = """
mount --make-rprivate /
mount --bind "$0" "$0"
mount -o remount,ro,bind /
if touch /penstock-probe 2>/dev/null; then exit 9; fi
exec "$@"
"""
"""Makes everything but the folder $0 read-only, and executes the command after it."""
TOKEN = "0f" * 32


def sandbox(folder: Path) -> tuple[str, ...]:
    """Return a command prefix that makes only `folder` writable; skip if that is not permitted."""
    through = ("unshare", "--mount", "sh", "-eu", "-c", READ_ONLY, str(folder))
    tried = subprocess.run(
        (*through, "true"), capture_output=True, timeout=TEST_TIMEOUT_S, check=False
    )
    if tried.returncode:
        pytest.skip(f"no mount namespace: {tried.stderr.decode().strip()[-100:]}")
    return through


@pytest.fixture
def root() -> Iterator[Path]:
    """Provide a folder with a path as short as in a pod, because the path of a Unix socket has at
    most 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        yield Path(folder)


async def test_a_pod_as_the_manifests_make_it(root: Path) -> None:
    manifests = build("base")
    settings = dict(settings_of(manifests))
    folders = {
        item["mountPath"]: root / item["name"] for item in container_of(manifests)["volumeMounts"]
    }
    for folder in folders.values():
        folder.mkdir()
    text = named_manifest(manifests, "ConfigMap", "penstock-policy")["data"]["policy.toml"]
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    filled = re.sub(r'"0{64}"', f'"{digest}"', text, count=1)
    (folders["/etc/penstock/policy"] / "policy.toml").write_text(filled, encoding="utf-8")
    for name, value in settings.items():
        folder, _, file = value.rpartition("/")
        if value in folders:
            settings[name] = str(folders[value])
        elif folder in folders:
            settings[name] = str(folders[folder] / file)
    # The test chooses the ports, and binds only 127.0.0.1.
    for name in ("HOST", "OPERATIONS_HOST"):
        assert settings.pop(f"PENSTOCK_{name}") == "0.0.0.0"
    environment = {**settings, "TMPDIR": str(folders["/tmp"]), "HOME": "/nonexistent"}

    doors = ("--operations-port", "0", "--metrics-port", "0")
    async with started(
        *simulated(), *doors, environment=environment, through=sandbox(root)
    ) as service:
        async with Client(service.address) as anonymous:
            with pytest.raises(Unauthenticated):
                await anonymous.generate_once("To be", max_tokens=4)
        async with Client(service.address, token=TOKEN) as client:
            result = await client.generate_once("To be", max_tokens=4)
            assert result.finished.usage.num_completion_tokens == 4

        service.signal(signal.SIGUSR1)
        await service.until_logged("flight record (")
        assert list(folders[settings_of(manifests)["PENSTOCK_FLIGHT_FOLDER"]].iterdir())
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
    # The log is JSON, as configured.
    assert all(line.startswith("{") for line in service.stderr)
