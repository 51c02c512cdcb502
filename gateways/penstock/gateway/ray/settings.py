"""The settings of a deployment: the `args` of Serve's config, validated.

Owns names, defaults and bounds. How many replicas there are, and on what, is in Serve's part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from penstock.gateway.ray.service import command_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`serve_options`: those of `penstock serve`, the same for each replica. `start_timeout_s`:
    until it must be ready, its model loaded. `stop_timeout_s`: for its shutdown; less
    than Serve's `graceful_shutdown_timeout_s`, which has begun before."""

    serve_options: tuple[str, ...] = ()
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is off."""
        command_line(self.serve_options)
        for name in ("start_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")


def settings_of(args: Mapping[str, Any]) -> Settings:
    """The settings in `args`. Raises ValueError naming an unknown or invalid one."""
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(args) - known):
        raise ValueError(f"args: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    values = dict(args)
    if "serve_options" in values:
        values["serve_options"] = _texts(values["serve_options"])
    for name in known & {"start_timeout_s", "stop_timeout_s"} & set(values):
        if isinstance(values[name], bool) or not isinstance(values[name], int | float):
            raise ValueError(f"{name}: must be a number of seconds, not {values[name]!r}")
    return Settings(**values)


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"serve_options: must be a list, not {value!r}")
    texts: list[str] = []
    for item in cast("Sequence[object]", value):
        if not isinstance(item, str):
            raise ValueError(f"serve_options: {item!r} is no text; put it in quotes")
        texts.append(item)
    return tuple(texts)
