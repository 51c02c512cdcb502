"""The settings that a configuration declares in the annotations of its dataclasses.

Defines the names of a setting: its flag, its environment variable and its key in a settings file.
Adds the flags to an argument parser, in groups with headings, common flags first.
"""

import argparse
import dataclasses
import enum
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_origin

from penstock.scheduler.setting import Setting, declarations

ENVIRONMENT_PREFIX = "PENSTOCK_"
ON, OFF = "on", "off"
_METAVARS: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "FILE", tuple: "NAME,..."}


def variable_of(name: str) -> str:
    """Return the name of the environment variable of a setting or a flag. `name` has no leading
    dashes."""
    return ENVIRONMENT_PREFIX + name.replace("-", "_").upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A setting that a configuration declares.

    Attributes:
        path: The path of its field, such as `scheduler.order`.
        kind: The type of its values.
        default: The default of the field; `dataclasses.MISSING` if it has none or computes it.
    """

    path: str
    setting: Setting
    kind: Any
    default: Any

    @property
    def name(self) -> str:
        """The name of the setting, by default the name of its field."""
        return self.setting.name or self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The flag without its two dashes."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return variable_of(self.name)

    @property
    def key(self) -> str:
        """The key in a settings file, after the name of its TOML table: TABLE.KEY."""
        return f"{self.setting.group}.{self.name}"

    @property
    def choices(self) -> tuple[str, ...]:
        """All permitted values as texts, if the setting is a boolean, an enumeration or has
        `choices`; otherwise empty."""
        if self.kind is bool:
            return ON, OFF
        if isinstance(self.kind, type) and issubclass(self.kind, enum.Enum):
            return self.setting.choices or tuple(str(member.value) for member in self.kind)
        return self.setting.choices

    @property
    def metavar(self) -> str:
        """The placeholder of the value in the help text."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        if dataclasses.is_dataclass(self.kind):
            return "JSON|FILE"
        word = self.setting.metavar or _METAVARS[get_origin(self.kind) or self.kind]
        return f"{word}|{OFF}" if self.setting.may_be_off else word

    @property
    def shown_default(self) -> str:
        """The default in the form in which users write it, or its description."""
        if self.setting.shown:
            return self.setting.shown
        if isinstance(self.default, bool):
            return ON if self.default else OFF
        if isinstance(self.default, enum.Enum):
            return str(self.default.value)
        if self.setting.scale != 1:
            return f"{self.default / self.setting.scale:g}"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@functools.cache
def declared(kind: Any, prefix: str = "", *, has_all: bool = False) -> tuple[Declared, ...]:
    """Return the settings of a dataclass and its nested dataclasses, in the order of the fields:
    those with a group, with `has_all` also those without. `prefix` is prepended to their paths."""
    found: list[Declared] = []
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, (inner, setting) in declarations(kind).items():
        if setting and (setting.group or has_all):
            default = fields[name].default
            found.append(
                Declared(
                    path=prefix + name,
                    setting=setting,
                    kind=setting.kind or inner,
                    default=default,
                )
            )
        elif setting is None and dataclasses.is_dataclass(inner):
            found += declared(cast(Hashable, inner), f"{prefix}{name}.", has_all=has_all)
    return tuple(found)


def add_flags(
    parser: argparse.ArgumentParser, table: Sequence[Declared], groups: Mapping[str, str]
) -> None:
    """Add the flag `--config` and a flag for each setting. `groups` maps each group to its heading.

    The parsed arguments are texts; the module `sources` converts them later.
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


def add_to(group: argparse._ActionsContainer, items: Iterable[Declared]) -> None:  # pyright: ignore[reportPrivateUsage]  # it has no public name
    """Add a flag for each of the settings, with its bounds and its default in the help. The flag of
    a setting is required if the setting has neither a default nor a description of its default
    (`shown`)."""
    for item in items:
        is_required = item.default is dataclasses.MISSING and not item.setting.shown
        bounds = "" if item.choices else item.setting.bounds
        default = "" if is_required else f"default: {item.shown_default}"
        notes = "; ".join(note for note in (bounds, default) if note)
        group.add_argument(
            f"--{item.flag}",
            metavar=item.metavar,
            required=is_required,
            help=(item.setting.help + (f" ({notes})" if notes else "")).replace("%", "%%"),
        )
