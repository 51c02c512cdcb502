"""Settings as flags: groups with headings, those of every day first, every default shown."""

import argparse
from collections.abc import Mapping, Sequence

from penstock.server.settings.table import Declared


def add_flags(
    parser: argparse.ArgumentParser, table: Sequence[Declared], groups: Mapping[str, str]
) -> None:
    """Add a flag for each setting and `--config`; texts are read later, with the other sources."""
    everyday = parser.add_argument_group("every day")
    everyday.add_argument(
        "--config", metavar="FILE", help="TOML file with settings (default: no file)"
    )
    for name, heading in groups.items():
        items = [item for item in table if item.setting.group == name]
        for item in items:
            if item.setting.is_everyday:
                _add(everyday, item)
        others = [item for item in items if not item.setting.is_everyday]
        group = parser.add_argument_group(heading) if others else everyday
        for item in others:
            _add(group, item)


def _add(group: argparse._ArgumentGroup, item: Declared) -> None:  # pyright: ignore[reportPrivateUsage]  # it has no public name
    text = f"{item.setting.help} (default: {item.shown_default})"
    group.add_argument(f"--{item.flag}", metavar=item.metavar, help=text.replace("%", "%%"))
