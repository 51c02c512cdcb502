"""Settings as flags: groups with headings, common ones first, with their defaults."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from penstock.server.settings.table import Declared


def add_flags(
    parser: argparse.ArgumentParser, table: Sequence[Declared], groups: Mapping[str, str]
) -> None:
    """Add a flag for each setting and `--config`; texts are parsed later, with the other
    sources.
    """
    everyday = parser.add_argument_group("common")
    everyday.add_argument(
        "--config", metavar="FILE", help="TOML file with settings (default: no file)"
    )
    for name, heading in groups.items():
        items = [item for item in table if item.setting.group == name]
        add_to(everyday, [item for item in items if item.setting.is_everyday])
        others = [item for item in items if not item.setting.is_everyday]
        if others:
            add_to(parser.add_argument_group(heading), others)


def add_to(group: argparse._ArgumentGroup, items: Iterable[Declared]) -> None:  # pyright: ignore[reportPrivateUsage]  # it has no public name
    """Add a flag for each of the settings; one without a default is required."""
    for item in items:
        is_required = item.default is dataclasses.MISSING and not item.setting.shown
        default = "" if is_required else f" (default: {item.shown_default})"
        group.add_argument(
            f"--{item.flag}",
            metavar=item.metavar,
            required=is_required,
            help=(item.setting.help + default).replace("%", "%%"),
        )
