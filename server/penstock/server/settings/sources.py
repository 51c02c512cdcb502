"""Reads settings from flags, environment variables and a file. Flags override environment
variables, which override the file.

Parses texts, and creates error messages that name a setting as in its source: a flag, an
environment variable, or a key of a file with its table and file.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from penstock.scheduler.setting import SettingError, declarations
from penstock.server.settings.json_values import did_you_mean, from_json_value, parse_json
from penstock.server.settings.table import OFF, ON, Declared

T = TypeVar("T")
_PAGE = "docs/settings.md"


class BadSetting(ValueError):
    """A setting is invalid. The message names the setting in the form in which the user set it."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the user has set, converted to the type of the field.

    `spelling` names the setting in the form in which the user set it: a flag, a variable or a key.
    """

    value: Any
    spelling: str


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A TOML file with settings. `spelling` names the flag or variable that gave its path."""

    path: Path
    spelling: str


@dataclass(frozen=True, slots=True)
class Sources:
    """The values that the user has given for the settings in `table`, by name.

    `environment` has all environment variables.
    """

    table: Sequence[Declared] = field(repr=False)
    given: Mapping[str, Given]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value given for the setting `name`, or `default` if none was given."""
        return self.given[name].value if name in self.given else default

    def value(self, name: str) -> Any:
        """Return the value given for the setting `name`, or the default of the setting if none was
        given."""
        return self.get(name, next(item.default for item in self.table if item.name == name))

    def spell(self, name: str) -> str:
        """Return the name of the setting in the form in which the user set it; the flag if the user
        did not set it."""
        return self.given[name].spelling if name in self.given else f"--{name.replace('_', '-')}"

    def reject(self, names: Iterable[str], why: str) -> None:
        """Raise BadSetting with the reason `why` for the first of these settings that was given."""
        for name in names:
            if name in self.given:
                raise BadSetting(f"{self.spell(name)} {why}")

    def build(self, kind: type[T], derived: Mapping[str, Any]) -> T:
        """Build the configuration, an instance of `kind`. `derived` maps paths of fields to values
        that override given ones.

        Raises BadSetting for an invalid value.
        """
        names = {item.path: item.name for item in self.table}
        values = {
            item.path: self.given[item.name].value for item in self.table if item.name in self.given
        }
        values |= derived

        def spell(path: str) -> str:
            return self.spell(names[path]) if path in names else path.rpartition(".")[2]

        def made(kind: type, prefix: str) -> Any:
            arguments: dict[str, Any] = {}
            for name, (inner, _) in declarations(kind).items():
                path = prefix + name
                if path in values:
                    arguments[name] = values[path]
                elif any(other.startswith(f"{path}.") for other in values):
                    arguments[name] = made(inner, f"{path}.")
            try:
                return kind(**arguments)
            except SettingError as error:
                raise BadSetting(error.spelled(lambda name: spell(prefix + name))) from None
            except ValueError as error:
                raise BadSetting(str(error)) from error

        return cast(T, made(kind, ""))


def gather(
    table: Sequence[Declared],
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    file: GivenFile | None = None,
) -> Sources:
    """Collect the values given in `arguments`, `environment` and `file`; parse them and check their
    limits.

    `arguments` maps names of settings to the arguments of the command line. Texts in it are parsed,
    other values are used unchanged, and None means that the argument was not given. Raises
    BadSetting for an invalid value or file.
    """
    given = {} if file is None else _read_file(table, file)
    for item in table:
        argument, text = arguments.get(item.name), environment.get(item.variable)
        if argument is not None:
            given[item.name] = _read(item, argument, f"--{item.flag}")
        elif text is not None and not _is_from_kubernetes(item, text):
            given[item.name] = _read(item, text, item.variable)
    return Sources(table, given, environment)


def read_object(table: Sequence[Declared], values: Mapping[str, Any], prefix: str) -> Sources:
    """Read a JSON object whose keys are the names of settings in `table`, in the users' units; null
    is a value if it is the default. `prefix` precedes the keys in errors. Raises BadSetting.
    """
    known = {item.name: item for item in table}
    given: dict[str, Given] = {}
    for name, value in values.items():
        spelling, item = f"{prefix}{name}", known.get(name)
        if item is None:
            raise BadSetting(f"{spelling} is unknown{did_you_mean(name, known, _PAGE)}")
        if value is None and item.default is None:
            given[name] = Given(None, spelling)
        else:
            given[name] = _read(item, value, spelling, is_text=False, is_toml=False)
    return Sources(table, given)


def _is_from_kubernetes(item: Declared, text: str) -> bool:
    """Return True if the environment variable with the value `text` looks like one that Kubernetes
    has set.

    For example, Kubernetes sets PENSTOCK_PORT to a URL if a service is called penstock.
    """
    return item.name.endswith("port") and text.startswith("tcp://")


def _read_file(table: Sequence[Declared], given_file: GivenFile) -> dict[str, Given]:
    known = {item.key: item for item in table}
    groups = {item.setting.group for item in table}
    given: dict[str, Given] = {}
    file = given_file.path
    for group, values in read_table(file, given_file.spelling, is_toml=True).items():
        if group not in groups:
            name = f"[{group}]" if isinstance(values, dict) else group
            raise BadSetting(f"{file}: {name} is unknown{_suggestion(table, group, groups)}")
        if not isinstance(values, dict):
            raise BadSetting(f"{file}: {group} is not a table; write [{group}]")
        for name, value in cast("Mapping[str, object]", values).items():
            key = f"{group}.{name}"
            if key not in known:
                siblings = [each for each in known if each.startswith(f"{group}.")]
                raise BadSetting(f"{file}: {key} is unknown{_suggestion(table, name, siblings)}")
            given[known[key].name] = _read(known[key], value, f"{file}: {key}", is_text=False)
    return given


def _suggestion(table: Sequence[Declared], name: str, known: Iterable[str]) -> str:
    """Return `; did you mean KEY?`, with one or more keys, if the same key exists in another table
    or if a key is similar.

    Otherwise returns the result of `did_you_mean`.
    """
    keys = [item.key for item in table if item.name == name]
    names = {item.key.rpartition(".")[2]: item.key for item in table}
    near = [names[word] for word in difflib.get_close_matches(name, names, n=2, cutoff=0.7)]
    likely = keys or near
    return f"; did you mean {' or '.join(likely)}?" if likely else did_you_mean(name, known, _PAGE)


def _read(
    item: Declared, raw: object, spelling: str, *, is_text: bool = True, is_toml: bool = True
) -> Given:
    setting = item.setting
    try:
        if setting.may_be_off and raw == OFF:
            return Given(None, spelling)
        value = raw
        if isinstance(raw, str) and (is_text or dataclasses.is_dataclass(item.kind)):
            value = _of_text(item, raw, spelling)
        elif not is_text:
            value = _of_value(item, raw, spelling, is_toml=is_toml)
    except ValueError as error:
        raise BadSetting(str(error)) from error
    for part in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
        fault = setting.fault(part)
        if fault:
            raise BadSetting(f"{spelling} {fault}")
    if setting.scale != 1:
        value = cast(Any, value) * setting.scale
    return Given(value, spelling)


def _of_text(item: Declared, text: str, spelling: str) -> Any:
    """Parse the value of a flag or an environment variable."""
    kind = item.kind
    if dataclasses.is_dataclass(kind):
        data, is_toml = _read_json_or_file(text, spelling)
        return _of_value(item, data, spelling, is_toml=is_toml)
    if item.choices:
        if text not in item.choices:
            raise BadSetting(f"{spelling} must be one of {', '.join(item.choices)}, not {text!r}")
        return text == ON if kind is bool else kind(text)
    if get_origin(kind) is tuple:
        part = dataclasses.replace(item, kind=get_args(kind)[0])
        return tuple(_of_text(part, each.strip(), spelling) for each in text.split(","))
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "an integer" if kind is int else "a number"
            if item.setting.may_be_off:
                wanted = item.setting.bounds
            raise BadSetting(f"{spelling} must be {wanted}, not {text!r}") from None
    if get_origin(kind) is Mapping:
        return _pairs(text, spelling)
    return Path(text) if kind is Path else text


def _of_value(item: Declared, data: Any, spelling: str, *, is_toml: bool) -> Any:
    """Convert a value from a file or from JSON. If it is an object, its missing keys get the values
    in the setting's `base`."""
    given = data
    if isinstance(data, dict):
        given = {**(item.setting.base or {}), **cast("dict[str, object]", data)}
    value = from_json_value(item.kind, given, spelling, is_toml=is_toml)
    if item.setting.needs_all:
        missing = [each.name for each in dataclasses.fields(item.kind) if each.name not in data]
        if missing:
            raise BadSetting(f"{spelling}: {', '.join(missing)} missing")
    return value


def _read_json_or_file(text: str, spelling: str) -> tuple[Any, bool]:
    """If `text` is a JSON object or array, return its value, otherwise the value in the TOML or
    JSON file at the path `text`. Also returns True if the value was TOML."""
    if not text.lstrip().startswith(("{", "[")):
        path = Path(text).expanduser()
        return read_table(path, spelling), _is_toml(path)
    try:
        return parse_json(text), False
    except ValueError as error:
        raise BadSetting(f"{spelling} is not valid JSON: {error}") from error


def read_table(path: Path, spelling: str, *, is_toml: bool = False) -> Any:
    """Return the value in a file: TOML if `is_toml` or if the name ends in .toml, otherwise JSON.
    Raises BadSetting, which names the setting and the file, if the file cannot be read or is
    invalid."""
    is_toml = is_toml or _is_toml(path)
    form, parse = ("TOML", tomllib.loads) if is_toml else ("JSON", parse_json)
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetting(f"{spelling}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadSetting(f"{spelling}: {path} is not valid {form}: it is not UTF-8") from error
    except ValueError as error:
        raise BadSetting(f"{spelling}: {path} is not valid {form}: {error}") from error
    except RecursionError as error:  # In TOML.
        raise BadSetting(f"{spelling}: {path} is nested too deep") from error


def _is_toml(path: Path) -> bool:
    return path.suffix == ".toml"


def _pairs(text: str, spelling: str) -> dict[str, float]:
    """Parse pairs of a name and a number, such as `a=2,b=1`. A name may be empty or contain `=`."""
    pairs: dict[str, float] = {}
    for part in text.split(","):
        name, is_pair, number = part.rpartition("=")
        if name in pairs:
            raise BadSetting(f"{spelling}: {name!r} occurs twice")
        try:
            pairs[name] = float(number if is_pair else "")
        except ValueError:
            raise BadSetting(
                f"{spelling} must be NAME=WEIGHT,... with numbers, not {part!r}"
            ) from None
    return pairs
