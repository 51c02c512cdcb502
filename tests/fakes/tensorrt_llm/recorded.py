"""Generates classes from the recorded facts. Exactly the recorded fields are keyword arguments,
with the recorded defaults.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

from penstock.executor.trtllm.source_check import load_facts

_CLASSES = load_facts()["classes"]
_FACTORIES: dict[str, Callable[[], Any]] = {"list": list, "dict": dict}


class ValidationError(ValueError):
    """An unknown field or an invalid value."""


def recorded(path: str, check: Callable[[Any], None] | None = None) -> Any:
    """Return a class with the fields or, if it is an enum, the members recorded for `path`; `check`
    raises for an invalid instance.

    The class raises ValidationError for an unknown field if it is a pydantic model in the real
    package, TypeError otherwise.
    """
    record, name = _CLASSES[path], path.rpartition(".")[2]
    if record["kind"] == "enum":
        return enum.StrEnum(name, {member: member for member in record["members"]})
    entries = record.get("fields") or record["methods"]["__init__"]["parameters"]
    fields = [
        (field, Any, _field(entry["default"]))
        for field, entry in entries.items()
        if entry.get("since", "1.2") == "1.2"
    ]
    members: dict[str, Any] = {} if check is None else {"__post_init__": check}
    made = dataclasses.make_dataclass(name, fields, kw_only=True, namespace=members)
    if record["kind"] == "model":
        made.model_fields = {field[0]: field[2] for field in fields}  # type: ignore[attr-defined]
        made.__init__ = _strict(made.__init__, name, {field[0] for field in fields})  # type: ignore[misc]
    _FACTORIES[name] = made
    return made


def _field(default: Any) -> Any:
    match default:
        case {"required": True}:
            return dataclasses.field()
        case {"factory": str(name)}:
            return dataclasses.field(default_factory=_FACTORIES[name])
        case _:
            return dataclasses.field(default=default)


def _strict(made: Callable[..., None], name: str, known: set[str]) -> Callable[..., None]:
    @functools.wraps(made)
    def strict(self: Any, **values: Any) -> None:
        if unknown := sorted(values.keys() - known):
            raise ValidationError(f"{name}: Extra inputs are not permitted: {', '.join(unknown)}")
        made(self, **values)

    return strict
