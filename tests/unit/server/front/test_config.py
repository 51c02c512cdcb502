"""Errors in connection limits name the command-line flag, and valid limits reach the front."""

from __future__ import annotations

import pytest

from penstock.server.cli.serve import build_config, merge_settings
from penstock.server.front.config import TransportConfig
from penstock.server.rpc.options import KeepaliveConfig, keepalive_of
from penstock.server.settings.sources import BadSetting


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_connections", 0),
        ("handshake_timeout_s", 0.0),
        ("handshake_timeout_s", float("nan")),
        ("max_arrival_s", float("inf")),
        ("max_arrival_s", -1.0),
        ("max_connection_age_s", 0.0),
    ],
)
def test_bad_bounds_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        TransportConfig(**{name: value})  # type: ignore[arg-type] # the values are to be wrong
    with pytest.raises(BadSetting, match=name.replace("_", "-")):
        build_config(merge_settings({name: value}, {}))


def test_bounds_reach_the_front() -> None:
    given = {
        "max_connections": 7,
        "handshake_timeout_s": 2.5,
        "max_arrival_s": 3.5,
        "max_connection_age_s": 60.0,
    }
    config = build_config(merge_settings(given, {}))
    assert config.front.transport == TransportConfig(
        max_connections=7, handshake_timeout_s=2.5, max_arrival_s=3.5, max_connection_age_s=60.0
    )


def test_connections_age_as_set_and_their_grace_holds_the_longest_call() -> None:
    config = build_config(merge_settings({"max_connection_age_s": 60.0}, {}))
    assert keepalive_of(config.front) == KeepaliveConfig(max_connection_age_s=60.0)
    config = build_config(merge_settings({"max_deadline_s": 7200.0}, {}))
    assert keepalive_of(config.front) == KeepaliveConfig(max_connection_age_grace_s=7200.0)
