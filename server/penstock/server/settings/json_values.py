"""Converts immutable settings to JSON values and back.

Supports dataclasses, enums, paths, tuples, mappings and plain values. Also reads frozensets, and
values parsed from TOML, including times. Parses JSON strictly. Ranges of values are checked by the
dataclasses, not here.
"""

import dataclasses
import datetime
import difflib
import enum
import json
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from penstock.scheduler.setting import SettingError, setting_of

T = TypeVar("T")
_MAX_VALUE_CHARS = 80
_MAX_LISTED = 20
_NUM_SIMILAR = 3


_KIND_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    datetime.datetime: "a time with its zone: 2027-01-31T00:00:00Z",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
}
_OBJECT = "an object"
TABLE = "a table"
"""What TOML calls an object, in errors."""


class _UnknownKey(ValueError):
    """An object has a key that is not one of `known`. `where` is the path of the key."""

    def __init__(self, where: str, key: str, known: Iterable[str]) -> None:
        self.where, self.key, self.known = where, key, tuple(known)
        super().__init__(f"{where} is unknown")


class WrongKind(ValueError):
    """A value has the wrong type. `where` is its path; `unquoted` is the message without the
    value."""

    def __init__(self, where: str, wanted: str, data: object, *, is_toml: bool = False) -> None:
        self.where, self.wanted, self.data = where, wanted, data
        self.unquoted = f"{where} must be {wanted}"
        super().__init__(f"{self.unquoted}, not {_abbreviated(data, is_toml=is_toml)}")

    def in_toml(self) -> "WrongKind":
        """Return the same error in the terms of TOML, in which an object is a table."""
        wanted = TABLE if self.wanted == _OBJECT else self.wanted
        return WrongKind(self.where, wanted, self.data, is_toml=True)


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, for text that is nested too deep, and for a
    duplicate key, although most parsers accept duplicate keys."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"duplicate key {key!r}")
        values[key] = value
    return values


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` with the most similar known name, or "" if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def did_you_mean(name: str, known: Iterable[str], page: str) -> str:
    """Return a suffix for the error message about an unknown `name`: `; did you mean NAME?` if a
    known name is similar, otherwise `; known are NAMES`, or "" if `known` is empty.

    If no name is similar and more than 20 are known, the suffix lists only the three nearest ones,
    and refers to `page`, the path of the page that lists all.
    """
    names = sorted(known)
    near = nearest(name, names)
    if near or not names:
        return near
    if len(names) <= _MAX_LISTED:
        return f"; known are {', '.join(names)}"
    similar = difflib.get_close_matches(name, names, n=_NUM_SIMILAR, cutoff=0.0)
    return f"; the most similar are {', '.join(similar)}; {page} lists all {len(names)}"


def to_json_value(value: object) -> Any:
    """Convert `value` to values that `json.dumps` accepts. Raises TypeError for an unknown type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json_value(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        named = cast(Mapping[str, object], value)
        return {name: to_json_value(item) for name, item in named.items()}
    if isinstance(value, tuple | list):
        return [to_json_value(item) for item in cast(Sequence[object], value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def from_json_value(
    kind: type[T],
    data: object,
    where: str | None = None,
    *,
    page: str = "docs/settings.md",
    is_toml: bool = False,
) -> T:
    """Convert a value parsed from JSON or TOML to a value of `kind`. Missing fields get their
    defaults.

    Raises ValueError, which names the field, for an unknown field, a missing field without a
    default, a wrong type, or a value that the dataclass rejects, and TypeError for an unsupported
    `kind`. `where` is the path to `data` for errors, by default the name of the kind. `page` is the
    documentation page that lists the fields. If `is_toml`, errors use the terms of TOML.
    """
    try:
        return cast(T, _decode(kind, data, kind.__name__ if where is None else where))
    except _UnknownKey as error:
        raise ValueError(f"{error}{did_you_mean(error.key, error.known, page)}") from None
    except WrongKind as error:
        if not is_toml:
            raise
        raise error.in_toml() from None


def _decode(kind: Any, data: object, where: str) -> object:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_optional(kind, data, where)
    if origin in (tuple, frozenset):
        items = _decode_items(kind, data, where)
        return tuple(items) if origin is tuple else frozenset(items)
    if origin is Mapping:
        return _decode_mapping(kind, data, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast(type[object], kind), data, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _decode_enum(kind, data, where)
    if kind is Path:
        return Path(_checked(str, data, where))
    if kind is float:
        return _decode_float(data, where)
    if kind in (bool, int, str, datetime.datetime):
        return _checked(kind, data, where)
    raise TypeError(f"{where}: no JSON form for {kind}")


def _checked(kind: Any, data: object, where: str) -> Any:
    # bool is a subclass of int in Python, but not for users.
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise WrongKind(where, _KIND_WORDS[kind], data)
    return data


def _abbreviated(data: object, *, is_toml: bool) -> str:
    """Return a value as short text for an error message: `an object` (in TOML `a table`) or `an
    array` without its content, otherwise the value, truncated to `_MAX_VALUE_CHARS` characters."""
    match data:
        case Mapping():
            return TABLE if is_toml else _OBJECT
        case list():
            return _KIND_WORDS[list]
        case datetime.date() | datetime.time():
            return data.isoformat()
        case None | bool():
            return json.dumps(data)
        case _:
            text = repr(data)
            return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _decode_float(data: object, where: str) -> float:
    if isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            return math.inf if data > 0 else -math.inf
    return cast(float, _checked(float, data, where))


def _decode_optional(kind: Any, data: object, where: str) -> object:
    if data is None and type(None) in get_args(kind):
        return None
    (inner,) = (arg for arg in get_args(kind) if arg is not type(None))
    return _decode(inner, data, where)


def _decode_items(kind: Any, data: object, where: str) -> list[object]:
    item_kind = get_args(kind)[0]
    items = cast(list[object], _checked(list, data, where))
    return [_decode(item_kind, item, f"{where}[{i}]") for i, item in enumerate(items)]


def _decode_mapping(kind: Any, data: object, where: str) -> dict[str, object]:
    if not isinstance(data, Mapping):
        raise WrongKind(where, _OBJECT, data)
    item_kind = get_args(kind)[1]
    values = cast(Mapping[str, object], data)
    return {name: _decode(item_kind, item, _at(where, name)) for name, item in values.items()}


def _decode_enum(kind: type[enum.Enum], data: object, where: str) -> enum.Enum:
    try:
        return kind(data)
    except (TypeError, ValueError):  # A list is not hashable.
        names = ", ".join(repr(member.value) for member in kind)
        raise WrongKind(where, f"one of {names}", data) from None


def _decode_dataclass(kind: type[object], data: object, where: str) -> object:
    if not isinstance(data, Mapping):
        raise WrongKind(where, _OBJECT, data)
    values = cast(Mapping[str, object], data)
    hints = get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    for name in values:
        if name not in known:
            raise _UnknownKey(_at(where, name), name, known)
    for name, field in known.items():
        is_required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if is_required and name not in values:
            raise ValueError(f"{_at(where, name)} is missing")
    decoded = {
        name: _decode_field(hints[name], known[name], value, _at(where, name))
        for name, value in values.items()
    }
    try:
        return kind(**decoded)
    except SettingError as error:
        # The first name is given with its path; the others are fields next to it.
        first = error.names[0]
        path = f"{where}.{first}".lstrip(".")
        raise ValueError(error.spelled(lambda name: path if name == first else name)) from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _decode_field(hint: Any, field: "dataclasses.Field[Any]", data: object, where: str) -> object:
    """Decode the value of a field. The error for a wrong type includes the bounds of the field,
    unless they are the bounds of its items."""
    try:
        return _decode(hint, data, where)
    except WrongKind as error:
        setting = setting_of(field)
        if error.where != where or setting is None or setting.choices or not setting.bounds:
            raise
        if error.wanted in (_OBJECT, _KIND_WORDS[list]):
            raise
        raise WrongKind(where, f"{error.wanted} {setting.bounds}", data) from None


def _at(where: str, name: str) -> str:
    place = name if name.isidentifier() else repr(name)
    return f"{where}.{place}" if where else place
