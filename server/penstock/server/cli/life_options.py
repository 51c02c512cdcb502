"""Options of `penstock serve` for the lives of its processes.

Owns their table and which of them were given. The drain's is in the main table.
"""

from collections.abc import Mapping
from typing import Any

from penstock.server.cli.option import Option

LIFE_OPTIONS = (
    Option(
        flag="engine-hang-s",
        parse=float,
        default=None,
        help="seconds after which an engine that does not come round is killed and followed by"
        " another, 0 for never; more than its longest step takes (default: 30)",
    ),
    Option(
        flag="front-hang-s",
        parse=float,
        default=None,
        help="the same for a front (default: 10)",
    ),
)


def life_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the service's settings that were given."""
    names = (option.name for option in LIFE_OPTIONS)
    return {name: settings[name] for name in names if settings[name] is not None}
