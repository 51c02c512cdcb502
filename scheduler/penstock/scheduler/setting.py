"""Declares settings at their dataclass fields, and checks their values.

A declaration has a group, a help text, a name and bounds. Flags, environment variables and files
are read elsewhere.
"""

import functools
import math
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
_KEY = "setting"
_MAX_SHOWN_CHARS = 80


class SettingError(ValueError):
    """An invalid value. `message` has `{}` in place of field names.

    Callers insert the names that users see (flags, keys of a file) with `spelled`.
    """

    def __init__(self, message: str, *names: str) -> None:
        self.message, self.names = message, names
        super().__init__(self.spelled(str))

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the message, with each field name replaced by `spell(name)`."""
        # Not str.format: the text after the names may quote a value with braces.
        first, *rest = self.message.split("{}", len(self.names))
        return first + "".join(
            spell(name) + part for name, part in zip(self.names, rest, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """Metadata of a settings field; created by `setting`, `from_factory` and `required`.

    Numbers must be finite; with `may_be_infinite`, positive infinity is valid too.

    Attributes:
        group: The heading above its flag in the help, and its table in a file. If empty, the
            setting has no flag: it is a key in the JSON object of another setting, or users cannot
            set it and only its bounds apply.
        name: The user-facing name, if it differs from the field's.
        shown: A description of the default, if the value itself would be unclear.
        scale: Factor from the user's unit to the field's, such as MiB to bytes.
        may_be_zero: 0 is valid next to the values within the bounds.
        may_be_off: Users may write `off`, which means None.
        is_everyday: It is a common setting, listed first.
        kind: The type of the user's value, if it differs from the field's.
        base: Defaults for keys that users leave out of a table.
        needs_all: A table must have every key.
    """

    group: str = ""
    help: str = ""
    _: KW_ONLY
    name: str = ""
    shown: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    scale: float = 1
    may_be_infinite: bool = False
    may_be_zero: bool = False
    may_be_off: bool = False
    is_everyday: bool = False
    kind: type | None = None
    base: Mapping[str, object] | None = None
    needs_all: bool = False

    @property
    def bounds(self) -> str:
        """A description of the choices or bounds for help texts; empty if there are none."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.at_least is not None and self.at_most is not None:
            words = [f"in {_number(self.at_least)}..{_number(self.at_most)}"]
        else:
            limits = {"at least": self.at_least, "above": self.above}
            limits |= {"at most": self.at_most, "below": self.below}
            words = [f"{word} {_number(x)}" for word, x in limits.items() if x is not None]
        zero = "0 or " if self.may_be_zero and words else ""
        return zero + " and ".join(words) + (" or off" if self.may_be_off and words else "")

    def fault(self, value: object, kind: Any = None) -> str:
        """Return what is wrong with a value, as text to follow its name; empty if it is valid.
        `kind`: the type of the field; only `int` is checked.
        """
        if kind is int and (isinstance(value, bool) or not isinstance(value, Integral | None)):
            return f"must be an integer, not {_shortened(value)}"
        if isinstance(value, bool) or not isinstance(value, Real):
            is_inside = not self.choices or value is None or value in self.choices
        else:
            is_inside = self._holds(value)
        if is_inside:
            return ""
        wanted = self.bounds
        if isinstance(value, float) and not (math.isfinite(value) or self.may_be_infinite):
            has_upper = self.at_most is not None or self.below is not None
            wanted = wanted if has_upper else f"finite and {wanted}" if wanted else "finite"
        return f"must be {wanted}, not {_shortened(value)}"

    def _holds(self, value: Any) -> bool:
        if self.may_be_zero and value == 0:
            return True
        is_finite = not isinstance(value, float) or math.isfinite(value)
        return (
            (is_finite or (self.may_be_infinite and value > 0))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def setting(default: T, group: str = "", text: str = "", **more: Any) -> T:
    """Declare a field: `block_size: int = setting(16, "cache", "tokens per block", at_least=1)`.

    `text`: the help text. `more`: other attributes of `Setting`.
    """
    return field(default=default, metadata={_KEY: Setting(group, text, **more)})


def from_factory(
    factory: Callable[[], T], group: str, text: str, *, is_hashed: bool = True, **more: Any
) -> T:
    """Declare a field with a default factory. `is_hashed`: the field is part of the dataclass's
    hash. `text`, `more`: as in `setting`.
    """
    metadata = {_KEY: Setting(group, text, **more)}
    return field(default_factory=factory, hash=is_hashed, metadata=metadata)


def required(group: str = "", text: str = "", **more: Any) -> Any:
    """Declare a field without a default. Arguments as in `setting`."""
    return field(metadata={_KEY: Setting(group, text, **more)})


def check(config: object) -> None:
    """Raise SettingError for the first declared field of a dataclass whose value is invalid."""
    for name, (kind, setting) in declarations(cast(Hashable, type(config))).items():
        fault = setting.fault(getattr(config, name), kind) if setting else ""
        if fault:
            raise SettingError("{} " + fault, name)


def setting_of(item: "Field[Any]") -> Setting | None:
    """Return the declaration of a dataclass field; None if it has none."""
    return item.metadata.get(_KEY)


@functools.cache
def declarations(kind: Any) -> Mapping[str, tuple[Any, Setting | None]]:
    """Return the fields of a dataclass by name: the type of each, without None, and its declaration
    (None if it has none).
    """
    hints = get_type_hints(kind)
    return {item.name: (without_none(hints[item.name]), setting_of(item)) for item in fields(kind)}


def without_none(hint: Any) -> Any:
    """Return the type without None: `int` for `int | None`. A union of several types is returned
    unchanged.
    """
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    inner = [arg for arg in get_args(hint) if arg is not type(None)]
    return inner[0] if len(inner) == 1 else hint


def _shortened(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 2**63:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"
