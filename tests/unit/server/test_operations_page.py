"""The operators' page and the client's README name every call there is."""

from __future__ import annotations

import inspect
from pathlib import Path

import penstock.v1 as pb
from penstock.client import OperationsClient
from penstock.server.cli.top_view import SORT_KEYS
from penstock.server.rpc.operations_methods import MAX_PROFILE_S
from penstock.server.rpc.operations_service import MAX_CALLS
from penstock.v1 import operations_service_pb2

ROOT = Path(pb.__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
README = (ROOT / "clients" / "README.md").read_text(encoding="utf-8")


def test_the_page_names_every_call() -> None:
    (service,) = operations_service_pb2.DESCRIPTOR.services_by_name.values()

    assert {method.name for method in service.methods if f"`{method.name}`" not in PAGE} == set()


def test_the_readme_names_every_method() -> None:
    methods = {
        name
        for name, _ in inspect.getmembers(OperationsClient, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }

    assert {name for name in methods if f"`{name}(" not in README} == set()


def test_the_page_tells_the_bounds() -> None:
    assert f"{MAX_CALLS} calls are handled at a time" in PAGE
    assert f"for up to {MAX_PROFILE_S:g} s" in PAGE
    assert all(key in PAGE for key in SORT_KEYS)
