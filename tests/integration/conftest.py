"""Fixtures: services and builders that are closed at the end of the test, and both clients on a
scripted server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.server.text.model_text import ModelText
from support.client_adapters import AsyncAdapter, ClientAdapter, FakeTime, SyncAdapter
from support.fronts import ServedFront, serving
from support.link import socket_path
from support.operations_server import ServedOperations, serving_operations
from support.scripted_server import ScriptedServer, scripted_server
from support.security_files import SecurityFiles
from support.trtllm_engine import TrtllmHarness


@pytest.fixture
def build(tmp_path: Path, fake_trtllm: None) -> Iterator[Callable[..., TrtllmHarness]]:
    """Provide a function that builds a TrtllmHarness, which is closed at the end."""
    built: list[TrtllmHarness] = []

    def make(**settings: Any) -> TrtllmHarness:
        built.append(TrtllmHarness(tmp_path, **settings))
        return built[-1]

    yield make
    for harness in built:
        harness.close()


@pytest.fixture
def path() -> Iterator[Path]:
    """Provide a path for the socket of an engine."""
    with socket_path() as path:
        yield path


@pytest.fixture
def security_files(tmp_path: Path) -> SecurityFiles:
    return SecurityFiles(tmp_path)


@pytest.fixture
async def served(text: ModelText) -> AsyncIterator[ServedFront]:
    """Provide a front server whose engine the test controls."""
    async with serving(text) as served:
        yield served


@pytest.fixture
async def operations() -> AsyncIterator[ServedOperations]:
    """Provide an operations server with scripted data."""
    async with serving_operations() as operations:
        yield operations


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as server:
        yield server


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture(params=[AsyncAdapter, SyncAdapter], ids=["async", "blocking"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def adapter(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> AsyncIterator[ClientAdapter]:
    """Provide each of the clients in turn, connected to the scripted server."""
    adapter: ClientAdapter = kind(server.address, time)
    yield adapter
    await adapter.close()
