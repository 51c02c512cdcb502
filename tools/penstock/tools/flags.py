"""The flags of tools, declared as settings with the fields that they set.

Owns which settings of a configuration become flags, and reads these flags.
"""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from penstock.server.settings.sources import Sources
    from penstock.server.settings.table import Declared

T = TypeVar("T")


def flag_of(name: str) -> str:
    """Return the flag of a field that a SettingError names."""
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def add_settings(group: Any, kind: type, names: Collection[str] = ()) -> None:
    """Add flags for the settings of a configuration: all, or those of the given groups or names."""
    from penstock.server.settings.table import add_to

    add_to(group, _table(kind, names))


def read_settings(
    args: argparse.Namespace,
    kind: type[T],
    derived: Mapping[str, Any] | None = None,
    names: Collection[str] = (),
) -> T:
    """Build the configuration from the flags. Raises BadSetting."""
    return sources_of(args, kind, names).build(kind, derived or {})


def sources_of(args: argparse.Namespace, kind: type, names: Collection[str] = ()) -> "Sources":
    """Collect the configuration values that the flags set. Raises BadSetting."""
    from penstock.server.settings.sources import gather

    return gather(_table(kind, names), vars(args), {})


def _table(kind: type, names: Collection[str]) -> "tuple[Declared, ...]":
    """Return the settings of a configuration; of a simulated scheduler, only one is a flag, and no
    device decides its default.
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
