"""How the demo measures the capacity for its scene on deadlines, how it checks that the load
exceeded that capacity, how it counts outcomes, and how an error of a request ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Self, cast

import grpc
import pytest

from penstock.client import Client, DeadlineExceeded, Unavailable
from penstock.client.errors import Failure, error_of
from penstock.tools.demo import deadline
from penstock.tools.own_service import OwnService


class _CountingClient:
    """Counts concurrent requests. A request ends after the event loop has run all others."""

    def __init__(self) -> None:
        self.num_running = 0
        self.counts: list[int] = []

    async def generate(self, prompt: str, **_: Any) -> AsyncIterator[None]:
        self.num_running += 1
        await asyncio.sleep(0)
        self.counts.append(self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        yield None


async def test_capacity_is_measured_with_all_slots_busy() -> None:
    client = _CountingClient()
    assert await deadline.measured_capacity(cast(Client, client)) > 0.0
    num_slots = int(deadline.SERVE_ARGS[1])
    assert set(client.counts) == {num_slots}


class _BrokenClient:
    """Fails the second request, and never answers others."""

    def __init__(self, address: str) -> None:
        self.num_begun = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, prompt: str, **_: Any) -> AsyncIterator[None]:
        self.num_begun += 1
        if self.num_begun == 2:
            raise error_of(Failure(code=grpc.StatusCode.UNAVAILABLE, message="gone"))
        await asyncio.Event().wait()
        yield None


async def test_an_error_of_one_request_ends_the_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured_capacity(client: Client) -> float:
        return 100.0

    monkeypatch.setattr(deadline, "measured_capacity", measured_capacity)
    monkeypatch.setattr(deadline, "Client", _BrokenClient)
    service = cast(OwnService, SimpleNamespace(address="127.0.0.1:1"))
    with pytest.raises(Unavailable, match="gone"):
        await deadline.deadline_scene(service, service)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("share", "expected"), [(0.0, True), (11 / 16, True), (0.9, False)])
def test_a_load_that_is_served_in_time_is_no_overload(share: float, expected: bool) -> None:
    assert deadline.was_overload(share) is expected


@pytest.mark.parametrize(
    ("reason", "state", "expected"),
    [
        ("DEADLINE_UNREACHABLE", "PENDING", "rejected"),
        ("DEADLINE_UNREACHABLE", "PROCESSING", "ended early"),
        ("DEADLINE_EXCEEDED", "PROCESSING", "too late"),
        ("", "", "too late"),  # the client detected that the deadline passed
    ],
)
def test_only_what_ran_to_its_deadline_is_too_late(reason: str, state: str, expected: str) -> None:
    failure = Failure(
        code=grpc.StatusCode.DEADLINE_EXCEEDED,
        message="late",
        reason=reason,
        metadata={"state": state} if state else {},
    )
    error = error_of(failure)
    assert isinstance(error, DeadlineExceeded)
    assert deadline.outcome_of(error) == expected
