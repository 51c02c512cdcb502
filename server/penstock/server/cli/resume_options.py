"""The settings of `penstock serve` for requests that outlive their calls."""

from collections.abc import Mapping
from typing import Any

from penstock.server.cli.option import Option

RESUME_OPTIONS = (
    Option(
        flag="max-resume-grace-s",
        parse=float,
        default=None,
        help="seconds that a request may be kept for Resume, 0 to not offer it (default: 60)",
    ),
    Option(
        flag="max-resume-bytes",
        parse=int,
        default=None,
        help="bytes that the engine keeps of such requests, all together (default: 64 MiB)",
    ),
    Option(
        flag="max-parked-requests",
        parse=int,
        default=None,
        help="such requests that the engine keeps while nobody reads them (default: 1024)",
    ),
)


def resume_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was set, by the names of `FrontConfig`."""
    given = {option.name: settings[option.name] for option in RESUME_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}
