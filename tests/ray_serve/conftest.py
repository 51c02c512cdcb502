"""One Ray cluster for all tests in this folder, as it starts slowly."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ray_serve.ray_cluster import RayCluster, has_ray, ray_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    if not has_ray():
        pytest.skip(
            "needs ray[serve]: pip install '.[ray]', or name a Python by PENSTOCK_RAY_PYTHON"
        )
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    with ray_cluster(ports) as started:
        yield started
