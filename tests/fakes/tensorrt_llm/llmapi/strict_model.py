"""Models that reject unknown fields, as the real package's pydantic models do."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, ClassVar


class ValidationError(ValueError):
    """An unknown field or a bad value."""


@dataclasses.dataclass(frozen=True, slots=True)
class FieldInfo:
    """One entry of `model_fields`."""

    default: Any
    default_factory: Callable[[], Any] | None

    def get_default(self) -> Any:
        """Return the value of a field that is not set."""
        return self.default_factory() if self.default_factory is not None else self.default


def _info(entry: dataclasses.Field[Any]) -> FieldInfo:
    factory = entry.default_factory
    made = None if factory is dataclasses.MISSING else factory
    return FieldInfo(None if entry.default is dataclasses.MISSING else entry.default, made)


@typing.dataclass_transform(kw_only_default=True)
class StrictModel:
    """Keyword-only fields; an unknown name raises ValidationError."""

    model_fields: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(kw_only=True)(cls)
        cls.model_fields = {entry.name: _info(entry) for entry in dataclasses.fields(cls)}  # type: ignore[arg-type]  # made one just above
        made = cls.__init__

        @functools.wraps(made)
        def strict(self: Any, **values: Any) -> None:
            unknown = sorted(set(values) - set(type(self).model_fields))
            if unknown:
                raise ValidationError(
                    f"{type(self).__name__}: Extra inputs are not permitted: {', '.join(unknown)}"
                )
            made(self, **values)

        cls.__init__ = strict  # type: ignore[method-assign]  # wraps what dataclass made


def within(model: str, field: str, value: float | None, low: float, high: float) -> None:
    """Raise ValidationError unless low <= value <= high; None passes."""
    if value is not None and not low <= value <= high:
        raise ValidationError(f"{model}.{field} must be in [{low}, {high}], got {value}")
