"""Lists the keys of settings whose values are JSON objects, from the settings' declarations."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from penstock.scheduler.setting import Setting, declarations
from penstock.server.settings.table import Declared

_REQUIRED = "must be given"
_METAVARS: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a JSON object. `path`: its path from the outermost object, such as "cost.step_s";
    `[]` stands for the items of an array. `values`, `default`, `text`: as displayed on the page.
    """

    path: str
    values: str
    default: str
    text: str


def keys_of(item: Declared) -> tuple[Key, ...]:
    """Return the keys of a setting whose kind is a dataclass, and of the objects in it. Raises
    TypeError for a field that is not declared with `setting`.
    """
    defaults: Mapping[str, object] = item.setting.base or {}
    keys = keys_of_kind(item.kind)
    if item.setting.needs_all:
        return tuple(dataclasses.replace(key, default=_REQUIRED) for key in keys)
    return tuple(
        dataclasses.replace(key, default=_written(defaults[key.path]))
        if key.path in defaults
        else key
        for key in keys
    )


def keys_of_kind(kind: Any) -> tuple[Key, ...]:
    """Return the keys of a JSON object that is read as a dataclass, and of the objects in it.
    Raises TypeError for a field that is not declared with `setting`.
    """
    return tuple(_keys(kind, ""))


def keys_of_table(table: Iterable[Declared]) -> tuple[Key, ...]:
    """Return the keys of a JSON object that has settings under their names, in the users' units."""
    return tuple(
        Key(
            path=item.name,
            values=_values(item.kind, item.setting),
            default=_default(_unscaled(item), item.setting),
            text=item.setting.help,
        )
        for item in table
    )


def _unscaled(item: Declared) -> object:
    is_scaled = item.setting.scale != 1 and isinstance(item.default, float)
    return item.default / item.setting.scale if is_scaled else item.default


def _keys(kind: Any, prefix: str) -> Iterator[Key]:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, (inner, setting) in declarations(kind).items():
        path = f"{prefix}{name}"
        item_kind = get_args(inner)[0] if get_origin(inner) is tuple else None
        if setting is not None:
            yield Key(
                path=path,
                values=_values(inner, setting),
                default=_default(fields[name].default, setting),
                text=setting.help,
            )
        elif dataclasses.is_dataclass(inner):
            yield from _keys(inner, f"{path}.")
        elif dataclasses.is_dataclass(item_kind):
            yield from _keys(item_kind, f"{path}[].")
        else:
            raise TypeError(f"{kind.__name__}.{name} is not declared with `setting`")


def _values(kind: Any, setting: Setting) -> str:
    if get_origin(kind) is tuple:
        return f"array of {_values(get_args(kind)[0], setting)}"
    if get_origin(kind) is Mapping:
        return f"object of numbers {setting.bounds}"
    if dataclasses.is_dataclass(kind):
        return "object"
    if issubclass(kind, enum.Enum):
        return f"`{{{','.join(str(member.value) for member in kind)}}}`"
    if setting.choices:
        return f"`{{{','.join(setting.choices)}}}`"
    if kind is bool:
        return "`{true,false}`"
    return f"`{setting.metavar or _METAVARS[kind]}` {setting.bounds}".rstrip()


def _default(default: object, setting: Setting) -> str:
    if setting.shown:
        return setting.shown
    if default is dataclasses.MISSING:
        return _REQUIRED
    return _written(default)


def _written(value: object) -> str:
    """Return a value as it is written in JSON and TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value)
