"""The settings of `penstock serve` for requests whose engine dies."""

from collections.abc import Mapping
from typing import Any

from penstock.server.cli.option import Option

REPLAY_OPTIONS = (
    Option(
        flag="max-replays",
        parse=int,
        default=None,
        help="engines that a request may lose and go on with the next, 0 for none (default: 4)",
    ),
    Option(
        flag="max-replay-wait-s",
        parse=float,
        default=None,
        help="seconds that a request waits for the next engine (default: 60)",
    ),
)


def replay_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was set, by the names of `FrontConfig`."""
    given = {option.name: settings[option.name] for option in REPLAY_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}
