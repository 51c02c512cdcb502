"""Generates flags of the tools from the settings that configuration classes declare."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from penstock.server.settings.sources import Sources
    from penstock.server.settings.table import Declared

T = TypeVar("T")


def flag_of(name: str) -> str:
    """Return the command-line flag for a field name in a SettingError, such as "a.max_tokens"."""
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def add_settings(group: Any, kind: type, names: Collection[str] = ()) -> None:
    """Add flags for the settings of the configuration class `kind`: for all settings, or only for
    settings whose group or name is in `names`.
    """
    from penstock.server.settings.table import add_to

    add_to(group, _table(kind, names))


def read_settings(
    args: argparse.Namespace,
    kind: type[T],
    derived: Mapping[str, Any] | None = None,
    names: Collection[str] = (),
) -> T:
    """Build a configuration of class `kind` from the flags and the values in `derived`. Settings in
    `derived` have no flags. `names`: as in `add_settings`. Raises BadSetting.
    """
    return sources_of(args, kind, names).build(kind, derived or {})


def sources_of(args: argparse.Namespace, kind: type, names: Collection[str] = ()) -> "Sources":
    """Return the values of the settings of class `kind` that the flags set. `names`: as in
    `add_settings`. Raises BadSetting.
    """
    from penstock.server.settings.sources import gather

    return gather(_table(kind, names), vars(args), {})


def _table(kind: type, names: Collection[str]) -> "tuple[Declared, ...]":
    """Return the settings of class `kind` that become flags; `names`: as in `add_settings`. Of the
    nested scheduler settings, only `max_num_batched_tokens` becomes a flag, and its help shows the
    plain default.
    """
    from penstock.server.settings.table import declared

    return tuple(
        replace(item, setting=replace(item.setting, shown=""))
        if item.path.startswith("scheduler.")
        else item
        for item in declared(kind)
        if (not names or item.setting.group in names or item.name in names)
        and (not item.path.startswith("scheduler.") or item.name == "max_num_batched_tokens")
    )
