"""The bounds of connections: each wrong value is named, by its flag on the command line."""

from __future__ import annotations

import pytest

from penstock.server.cli.serve import BadSetting, build_config, merge_settings
from penstock.server.front.transport import TransportConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_connections", 0),
        ("handshake_timeout_s", 0.0),
        ("handshake_timeout_s", float("nan")),
        ("max_arrival_s", float("inf")),
        ("max_arrival_s", -1.0),
    ],
)
def test_bad_bounds_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        TransportConfig(**{name: value})  # type: ignore[arg-type] # the values are to be wrong
    with pytest.raises(BadSetting, match=name.replace("_", "-")):
        build_config(merge_settings({name: value}, {}))


def test_bounds_reach_the_front() -> None:
    given = {"max_connections": 7, "handshake_timeout_s": 2.5, "max_arrival_s": 3.5}
    config = build_config(merge_settings(given, {}))
    assert config.front.transport == TransportConfig(
        max_connections=7, handshake_timeout_s=2.5, max_arrival_s=3.5
    )
