from __future__ import annotations

import contextlib
from typing import Any

import pytest

from penstock.client import LiveRequest, ServerStats
from penstock.client.call_settings import CONTROL_DEADLINE_S
from penstock.client.operations_decoding import decode_stats
from penstock.server.cli import top
from penstock.server.rpc.mapping_operations import stats_of
from penstock.tools.command_line import main
from support.snapshots import SNAPSHOT


class RecordingClient:
    """Records the deadlines of its calls."""

    def __init__(self) -> None:
        self.deadlines_s: list[float] = []

    def get_stats(self, *, deadline_s: float) -> ServerStats:
        self.deadlines_s.append(deadline_s)
        return decode_stats(stats_of(SNAPSHOT))

    def list_requests(self, *, deadline_s: float, **_: Any) -> tuple[LiveRequest, ...]:
        self.deadlines_s.append(deadline_s)
        return ()


def test_top_once_has_the_deadline_of_other_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = RecordingClient()
    monkeypatch.setattr(top, "_connect", lambda _: contextlib.nullcontext(client))

    assert main(["top", "--once", "--json", "--address", "127.0.0.1:1"]) == 0

    assert client.deadlines_s == [CONTROL_DEADLINE_S] * 2
