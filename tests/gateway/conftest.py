"""Fixtures of the gateway tests. They provide the generated protocol code, and skip tests if the
gateway or a client for it is not installed.
"""

from __future__ import annotations

import pytest

from gateway.smg import CONTRACT, missing_packages

collect_ignore_glob = ["test_protocol_*.py"] if CONTRACT in missing_packages() else []


@pytest.fixture(autouse=True, scope="module")
def needs_gateway(request: pytest.FixtureRequest) -> None:
    missing = missing_packages()
    if missing and request.path.name.startswith("test_smg_"):
        pytest.skip(f"not installed: {', '.join(missing)}")
